"""Call a user's function in the child process by a convention: of TRL, of verl, or of this package.

A convention takes the function, one row of arguments and the section's options, and returns a value for JSON. `CALLS`
lists the conventions.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from numbers import Real
from typing import Any, Literal

from ppo_repro.base.float32 import FLOAT32_MAX
from ppo_repro.base.output import did_you_mean, shown
from ppo_repro.user.file import RefusedError, check_call, described, require_function
from ppo_repro.user.messages import CallRow

Function = Callable[..., Any]


@dataclass(frozen=True)
class Turn:
    """One turn of a transcript, by the model or the environment."""

    role: Literal["model", "environment"]
    text: str


@dataclass(frozen=True)
class Transcript:
    """Prompt and all turns after it. Model and environment alternate, and the model begins."""

    key: str  # key of the prompt
    prompt: str
    answer: str  # the expected answer; empty if the prompt has none
    fields: dict[str, Any]  # the prompt's other fields, a copy
    turns: tuple[Turn, ...]

    @property
    def last(self) -> str:
        """Return the text of the last turn."""
        return self.turns[-1].text

    @property
    def text(self) -> str:
        """Return the joined text of all turns."""
        return "".join(turn.text for turn in self.turns)

    @property
    def own(self) -> str:
        """Return the joined text of the model's turns."""
        return "".join(turn.text for turn in self.turns if turn.role == "model")


def make_transcript(row: CallRow) -> Transcript:
    """Return the transcript of a row, which `problems.row_of` made."""
    turns = tuple(Turn("environment" if i % 2 else "model", text) for i, text in enumerate(row["turns"]))
    return Transcript(row["key"], row["prompt"], row["answer"], json.loads(row["fields"]), turns)


def number(value: Any) -> float:
    """Convert a bool, a number, a scalar of NumPy or a 0-d tensor to a float.

    Raises RefusedError for any other type, for NaN and infinities, and for numbers beyond float32.
    """
    plain = value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value
    try:
        converted = float(plain) if isinstance(plain, Real | Decimal) else math.nan
    except (OverflowError, ValueError):
        converted = math.nan
    if not abs(converted) <= FLOAT32_MAX:
        raise RefusedError(f"returned {_value(plain)}; must be a finite number within float32 (3.4e+38)")
    return converted


def _value(value: Any) -> str:
    shape = getattr(value, "shape", None)
    of_shape = "" if shape is None else f" and shape {shown(repr(tuple(shape)))}"
    return f"{shown(repr(value))} of type {type(value).__name__}{of_shape}"


def _list(value: object, entries: str) -> list[Any]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise RefusedError(f"returned a {type(value).__name__}; must be a list, {entries}")
    return list(value)


def _step(function: Function, row: CallRow, options: CallRow) -> str | None:
    value = function(make_transcript(row))
    if value is not None and not isinstance(value, str):
        raise RefusedError(f"returned {_value(value)}; must be a text or None")
    if value == "":
        raise RefusedError("returned an empty text; must be None where the episode is over")
    return value


def _named(function: Function, values: Mapping[str, Any]) -> Any:
    """Call a function with the values that its parameters name, or with all values if it takes **others."""
    parameters = _parameters(function).values()
    lacking = [p.name for p in parameters if p.default is p.empty and p.kind in _BY_NAME and p.name not in values]
    if lacking:
        data = [name for name, value in values.items() if not (callable(value) or isinstance(value, _Withheld))]
        is_answer = lacking[0] in ("answer", *PLAIN["answer"])
        there = "no prompt of the task has one" if is_answer else f"there is only {', '.join(data)}"
        raise RefusedError(f"asks for '{lacking[0]}', and {there}")
    by_position = {p.name: values.get(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_ONLY}
    takes_others = any(p.kind is p.VAR_KEYWORD for p in parameters)
    asked = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [name for name in values if (takes_others or name in asked) and name not in by_position]
    try:
        return function(*by_position.values(), **{name: values[name] for name in names})
    except TypeError as error:
        if takes_others and "unexpected keyword" in str(error):
            advice = "if a decorator hides the function's parameters, give the decorator functools.wraps"
            raise RefusedError(f"raised {described(error)}; {advice}") from error
        raise


def _plain(function: Function, row: CallRow, options: CallRow) -> float:
    """Call a reward with the values that its parameters name; PLAIN lists the names and aliases."""
    transcript = make_transcript(row)
    values = {
        **{name: row[name] for name in ("prompt", "response", "full_text")},
        **_answer(row, options),
        "fields": transcript.fields,
        "turns": list(transcript.turns),
    }
    asked = _parameters(function)
    aliases = {
        other: values[name] for name, others in PLAIN.items() if name in values for other in others if other in asked
    }
    return number(_named(function, {**values, **aliases}))


def _answer(row: CallRow, options: CallRow) -> dict[str, str]:
    """Return the argument `answer`, which no function gets if no prompt of the task has an answer."""
    return {"answer": row["answer"]} if options.get("has_answers", True) else {}


class _Withheld:
    """Placeholder that raises RefusedError when used, for a value that no score may depend on."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise RefusedError(_WITHHELD.format(self._name))


_WITHHELD = "asks for {}, which is not given: a score must follow from prompt and response alone"


def _left_out(name: str) -> Callable[..., None]:
    """Return a stand-in for TRL's function `name`. It prints once for each metric that runs do not record it."""

    def log(key: str, *values: Any) -> None:
        if (name, key) not in _said:
            _said.add((name, key))
            print(f"{name}('{shown(key)}'): is not recorded; a run records scores only", file=sys.stderr)

    return log


_said: set[tuple[str, str]] = set()


def _trl(function: Function, row: CallRow, options: CallRow) -> float:
    """Call TRL's `reward_func` with lists of one entry.

    Each call has one response, because the layout of a run decides which responses are judged together.
    """
    return _trl_together(function, {"rows": [row]}, options)[0]


def _trl_together(function: Function, row: CallRow, options: CallRow) -> list[float]:
    """Call TRL's `reward_func(prompts=[...], completions=[...], **columns) -> [float]` with all rows in each list."""
    rows = row["rows"]
    prompts, completions = [entry["prompt"] for entry in rows], [entry["response"] for entry in rows]
    if options["conversational"]:
        prompts = [_messages(entry) for entry in rows]
        completions = [[{"role": "assistant", "content": completion}] for completion in completions]
    fields = [{**_answer(entry, options), **json.loads(entry["fields"])} for entry in rows]
    values = {
        **{name: [columns.get(name) for columns in fields] for name in dict.fromkeys(chain(*fields))},
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [entry["response_ids"] for entry in rows],
        **{name: _left_out(name) for name in ("log_extra", "log_metric")},
        "trainer_state": _Withheld("trainer_state"),
    }
    scores = _list(_named(function, values), "one number for each completion")
    if len(scores) != len(rows):
        raise RefusedError(
            f"returned {len(scores)} numbers; must return a list of {len(rows)}, for {len(rows)} completion"
            + "s" * (len(rows) > 1)
        )
    return list(map(number, scores))


def _messages(row: CallRow) -> list[dict[str, str]]:
    """Return the chat messages of a prompt. A text is a message of the user."""
    if row["messages"] is None:
        return [{"role": "user", "content": row["prompt"]}]
    messages: list[dict[str, str]] = json.loads(row["messages"])
    return messages


def _verl(function: Function, row: CallRow, options: CallRow) -> float:
    """Call verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`: a float or a dict's `score`."""
    fields = json.loads(row["fields"])
    source = fields.pop("data_source", options["data_source"])
    extra = fields.get("extra_info", fields)
    values = dict(data_source=source, solution_str=row["response"], ground_truth=row["answer"], extra_info=extra)
    value = _named(function, values)
    if isinstance(value, dict) and "score" not in value:
        raise RefusedError(f"returned a dict with {sorted(value)}; must be a number or a dict with 'score'")
    return number(value["score"] if isinstance(value, dict) else value)


def _prompts(function: Function, row: CallRow, options: CallRow) -> list[dict[str, Any]]:
    entries = _list(function(**row), "with a dict for each prompt")
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            kind = type(entry).__name__
            raise RefusedError(f"returned a {kind} as entry {i}; must be a dict with 'prompt', 'answer' and others")
        try:
            json.dumps(dict(entry), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RefusedError(f"returned in entry {i} what JSON does not have ({shown(str(error))})") from None
    return list(map(dict, entries))


def _scores(function: Function, row: CallRow, options: CallRow) -> list[float]:
    transcripts = [make_transcript(entry) for entry in row["transcripts"]]
    values = _list(function(transcripts), "one number for each transcript")
    if len(values) != len(transcripts):
        raise RefusedError(f"returned {len(values)} numbers for {len(transcripts)} transcripts")
    numbers = []
    for transcript, value in zip(transcripts, values, strict=True):
        try:
            numbers.append(number(value))
        except RefusedError as error:
            raise RefusedError(f"{error}; prompt key '{shown(transcript.key)}'") from None
    return numbers


@dataclass(frozen=True)
class Convention:
    """How a kind of function is called, and the parameters by which it is known before it is called."""

    call: Callable[[Function, CallRow, CallRow], object]
    positions: tuple[str, ...] = ()  # the arguments by position, if all functions of this kind have the same arguments
    shown_by: frozenset[str] = frozenset()  # parameters of a reward that show that it is of this kind
    withheld: frozenset[str] = frozenset()  # parameters of this kind in other stacks that no function gets


CALLS = {
    # a user's reward, by its `kind` in the configuration
    "function": Convention(_plain, shown_by=frozenset({"prompt", "response"})),
    "trl": Convention(_trl, shown_by=frozenset({"completions"}), withheld=frozenset({"trainer_state"})),
    "verl": Convention(_verl, shown_by=frozenset({"data_source", "solution_str"})),
    # the functions of a task's file
    "prompts": Convention(_prompts),
    "scores": Convention(_scores, positions=("transcripts",)),
    "step": Convention(_step, positions=("transcript",)),
    # no kind of a user's function: the trial of TRL's, and functions of this package
    "trl_together": Convention(_trl_together),
    "keywords": Convention(lambda function, row, options: number(function(**row))),
    "unchecked": Convention(lambda function, row, options: function(**row, **options)),
}
# names that a reward's parameters may have, with their aliases; fields and turns are copies
PLAIN = {
    "prompt": ("question",),
    "response": ("completion", "solution_str"),
    "answer": ("ground_truth",),
    "fields": ("extra_info",),
    "turns": (),
    "full_text": (),
}
_RESPONSE_NAMES = {"response", *PLAIN["response"], "turns", "full_text"}
_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(function: Function) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions
        return {}


def check_signature(name: str, function: Any, call: str) -> None:
    """Raise RefusedError, which names the possible parameters, if a value is no function of a convention."""
    require_function(name, function)
    convention, parameters = CALLS[call], _parameters(function)
    if convention.positions:
        check_call(name, function, convention.positions, {})
    for withheld in convention.withheld & parameters.keys():
        raise RefusedError(f"{name} {_WITHHELD.format(withheld)}; remove the parameter")
    kinds = [kind for kind, other in CALLS.items() if other.shown_by and other.shown_by <= parameters.keys()]
    if convention.shown_by and kinds and call not in kinds:
        raise RefusedError(f"{name} has the parameters of a reward of kind {kinds[0]}; set kind: {kinds[0]}")
    if call == "function":
        _check_plain(name, parameters)


def _check_plain(name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    gets = ", ".join(f"{key} ({', '.join(aliases)})" if aliases else key for key, aliases in PLAIN.items())
    known = {*PLAIN, *chain(*PLAIN.values())}
    for parameter in parameters.values():
        if parameter.kind in _BY_NAME and parameter.name not in known:
            meant = did_you_mean(parameter.name, sorted(known))
            if meant or parameter.default is parameter.empty:
                raise RefusedError(f"{name} has a parameter '{parameter.name}'; it gets by name {gets}{meant}")
    takes_others = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_others and not parameters.keys() & _RESPONSE_NAMES:
        raise RefusedError(f"{name} has no parameter for the response; it gets by name {gets}")
