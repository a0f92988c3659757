"""The program in which a user's functions run, one process beside a run.

Requests and replies are JSON objects on a connection to the run. It imports nothing that takes time; torch and NumPy
come only with a file of the user's that imports them.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import random
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from ppo_repro.errors import UserError
from ppo_repro.output import shown

FLOAT32_MAX = 3.4028234663852886e38
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl

Row = Mapping[str, Any]
_functions: dict[tuple[str, str], Callable[..., Any]] = {}  # by field of the configuration and name


@dataclass(frozen=True)
class Turn:
    """One turn."""

    role: Literal["model", "environment"]
    text: str


@dataclass(frozen=True)
class Transcript:
    """A prompt and all turns that followed; they alternate, and the model's is the first."""

    key: str  # of the prompt
    prompt: str
    answer: str  # the expected one; empty if the prompt has none
    fields: dict[str, Any]  # the prompt's other fields, a copy
    turns: tuple[Turn, ...]

    @property
    def last(self) -> str:
        """The text of the last turn."""
        return self.turns[-1].text

    @property
    def text(self) -> str:
        """The text of all turns, one after the other."""
        return "".join(turn.text for turn in self.turns)

    @property
    def own(self) -> str:
        """The model's own words: the text of its turns, one after the other."""
        return "".join(turn.text for turn in self.turns if turn.role == "model")


def make_transcript(row: Row) -> Transcript:
    """The transcript in a row of `problems.row_of`."""
    turns = tuple(Turn("environment" if i % 2 else "model", text) for i, text in enumerate(row["turns"]))
    return Transcript(row["key"], row["prompt"], row["answer"], json.loads(row["fields"]), turns)


class RefusedError(Exception):
    """A value that a function must not return; the message says which, and what is allowed."""


def number(value: object) -> float:
    """The float that is exactly `value`: a bool, int, float, Fraction or Decimal, a scalar of NumPy, a 0-d tensor.

    RefusedError for any other type, for NaN and infinities, for what no float is, and beyond float32.
    """
    plain: Any = value
    if hasattr(plain, "item") and tuple(getattr(plain, "shape", (1,))) == ():
        plain = plain.item()
    try:
        converted = float(plain) if isinstance(plain, Real | Decimal) else None
    except (OverflowError, ValueError):
        converted = None
    if converted is None or not abs(converted) <= FLOAT32_MAX or converted != plain:
        exact = ", which no float64 is exactly" if converted is not None and abs(converted) <= FLOAT32_MAX else ""
        raise RefusedError(f"returned {_value(value)}{exact}; must be a finite number within float32 (3.4e+38)")
    return converted


def _value(value: Any) -> str:
    kind = type(value).__name__
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine, as `async def` does"
    if value is None:
        return "None"
    if getattr(value, "shape", ()) != () and not isinstance(value, type):
        return f"a {kind} of shape {tuple(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an int of {value.bit_length()} bits"
    return f"{shown(repr(value))} of type {kind}"


def _list(value: object, of: str) -> list[Any]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise RefusedError(f"returned a {type(value).__name__}; must be a list, {of}")
    return list(value)


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RefusedError(f"returned {_value(value)}; must be a text or None")
    if value == "":
        raise RefusedError("returned an empty text; must be None where the episode is over")
    return value


def _plain(function: Callable[..., Any], row: Row, options: Row) -> float:
    """`function(prompt, response, answer)`, and by name what else it asks for."""
    transcript = make_transcript(row)
    by_name = {"fields": transcript.fields, "turns": list(transcript.turns), "full_text": row["full_text"]}
    try:
        parameters: Iterable[str] = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions
        parameters = ()
    more = {name: by_name[name] for name in parameters if name in by_name}
    return number(function(row["prompt"], row["response"], row["answer"], **more))


def _trl(function: Callable[..., Any], row: Row, options: Row) -> float:
    """TRL's `reward_func(prompts=[...], completions=[...], **columns) -> [float]`, each list of one entry.

    One response a call: which responses are judged together depends on the layout of a run.
    """
    prompt, completion = row["prompt"], row["response"]
    if options["conversational"]:
        prompt = [{"role": "user", "content": prompt}] if row["messages"] is None else json.loads(row["messages"])
        completion = [{"role": "assistant", "content": completion}]
    columns = {name: [value] for name, value in {"answer": row["answer"], **json.loads(row["fields"])}.items()}
    scores = _list(
        function(**{**columns, "prompts": [prompt], "completions": [completion]}), "one number for each completion"
    )
    if len(scores) != 1:
        raise RefusedError(f"returned {len(scores)} numbers; must return a list of 1, for 1 completion")
    return number(scores[0])


def _verl(function: Callable[..., Any], row: Row, options: Row) -> float:
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info) -> float`, or a dict with `score`."""
    fields = json.loads(row["fields"])
    source = fields.pop("data_source", options["data_source"])
    extra = fields.get("extra_info", fields)
    value = function(data_source=source, solution_str=row["response"], ground_truth=row["answer"], extra_info=extra)
    if isinstance(value, dict) and "score" not in value:
        raise RefusedError(f"returned a dict with {sorted(value)}; must be a number or a dict with 'score'")
    return number(value["score"] if isinstance(value, dict) else value)


def _prompts(function: Callable[..., Any], row: Row, options: Row) -> list[Any]:
    """Every entry as JSON has it, or a text that says why it is none."""
    entries = []
    for entry in _list(function(**row), "with a dict for each prompt"):
        if not isinstance(entry, Mapping):
            entries.append(f"is a {type(entry).__name__}; must be a dict with 'prompt', 'answer' and others")
            continue
        try:
            entries.append(json.loads(json.dumps(dict(entry), allow_nan=False)))
        except (TypeError, ValueError, RecursionError) as error:
            entries.append(f"has a value that JSON does not have ({shown(str(error))})")
    return entries


def _scores(function: Callable[..., Any], row: Row, options: Row) -> list[float]:
    transcripts = [make_transcript(one) for one in row["transcripts"]]
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


_CALLS: dict[str, Callable[[Callable[..., Any], Row, Row], object]] = {
    "function": _plain,
    "trl": _trl,
    "verl": _verl,
    "prompts": _prompts,
    "scores": _scores,
    "step": lambda function, row, options: _text(function(make_transcript(row))),
    "keywords": lambda function, row, options: number(function(**row)),
}


def _load(field: str, file: str, names: list[str], folder: str) -> dict[str, int | None]:
    """Execute the file as it is now; returns the line of each function, 0 if unknown, None if it is absent."""
    os.chdir(folder)  # another file may have left it
    name = "ppo_repro_user_" + re.sub(r"\W", "_", field)
    spec = spec_from_file_location(name, file)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up here
    exec(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True), module.__dict__)
    lines: dict[str, int | None] = {}
    for name in names:
        function = getattr(module, name, None)
        if function is None:
            lines[name] = None
            continue
        if not callable(function):
            raise RefusedError(f"{name} is no function; make it one or rename it")
        code = getattr(inspect.unwrap(function), "__code__", None)
        lines[name] = code.co_firstlineno if code is not None and code.co_filename == file else 0
        _functions[field, name] = function
    return lines


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python and, where the user's files have imported them, NumPy and torch."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _reply(file: str, compute: Callable[[], object]) -> dict[str, object]:
    try:
        return {"value": compute()}
    except RefusedError as error:
        return {"refused": str(error)}
    except UserError as error:  # of a file of this package
        return {"wrong": str(error)}
    except BaseException as error:  # SystemExit and KeyboardInterrupt of the user's code included
        # the last line of the file that the error went through; 0 if it went through none
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno or 0 for frame in reversed(frames) if frame.filename == file), 0)
        if isinstance(error, SyntaxError) and error.filename == file:
            line = error.lineno or 0
        return {"raised": described(error), "line": line}


def described(error: BaseException) -> str:
    """Type and message of an error on one line; a SyntaxError has the version of Python."""
    try:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
    except BaseException:  # the message is made by the user's code
        message = ""
    name = type(error).__name__ + (f" in Python {sys.version.split()[0]}" if isinstance(error, SyntaxError) else "")
    return f"{name}: {shown(message)}" if message else name


def _answers(request: dict[str, Any]) -> Iterable[dict[str, object]]:
    """The reply to each row, up to the first that is no value."""
    file = request["file"]
    if "names" in request:
        yield _reply(file, lambda: _load(**request))
        return
    function, call = _functions[request["field"], request["name"]], _CALLS[request["call"]]
    for row in request["rows"]:
        seed_generators(request["seed"])
        reply = _reply(file, lambda: call(function, row, request["options"]))  # noqa: B023 - called at once
        yield reply
        if "value" not in reply:
            return


def _ready() -> None:
    """End with the run, be the first that ends when memory runs out, and leave Ctrl-C and SIGTERM to the run."""
    for number_ in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number_, lambda *_: None)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        resource.setrlimit(resource.RLIMIT_DATA, (available, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def main() -> None:
    """Answer requests until the run closes the connection."""
    connection = Connection(int(sys.argv.pop()))
    os.set_inheritable(connection.fileno(), False)
    _ready()
    with suppress(EOFError):
        while True:
            for reply in _answers(json.loads(connection.recv_bytes())):
                for stream in (sys.stdout, sys.stderr):
                    with suppress(AttributeError, ValueError, OSError):
                        stream.flush()
                connection.send_bytes(json.dumps(reply).encode())
