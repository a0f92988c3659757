"""Load the prompts of a run with their answers and functions, and split them into training and held-out prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import count as count_from
from pathlib import Path
from typing import Any

import numpy as np

from ppo_repro.base.errors import UserError
from ppo_repro.base.json_lines import Line, text_field
from ppo_repro.base.output import shown
from ppo_repro.base.parquet_rows import read_records
from ppo_repro.base.seeding import permutation, words
from ppo_repro.config.tasks import PLACE, ArithmeticTask, ColumnAdditionTask, JsonlTask, PythonTask, TaskConfig
from ppo_repro.user.process import UserFunction, UserProcess, load

FIELD = "task.path"
_GYM_CALLS = {"entries": "unchecked", "score": "keywords"}
ROLES = {"system", "user", "assistant", "tool"}


@dataclass(frozen=True)
class Problem:
    """One prompt. Its key identifies it in records and does not depend on the order of the file."""

    key: str
    prompt: str
    answer: str  # empty if it has none
    fields: str = "{}"  # its other fields, for the user's functions: a JSON object with sorted names
    messages: str | None = None  # the prompt as a JSON list of chat messages, if it was given as one
    steps: tuple[str, ...] = ()  # the steps before the answer in a worked solution

    @property
    def solution(self) -> str:
        """Return the steps and the answer: the text that the warm start teaches."""
        return " ".join((*self.steps, self.answer))


def row_of(
    problem: Problem, turns: Sequence[str], response: str = "", full_text: str = "", ids: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the data about one response that is sent to the process of the user's functions.

    Args:
        turns: the text of every turn, from the model's first turn on.
        response: the text of the model's turns.
        full_text: the response with every special token spelled out.
        ids: the sampled tokens.
    """
    names = ("key", "prompt", "answer", "fields", "messages")
    row = {name: getattr(problem, name) for name in names}
    return {**row, "turns": list(turns), "response": response, "full_text": full_text, "response_ids": list(ids)}


@dataclass(frozen=True)
class Split:
    """Training and held-out problems of a task."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]

    @cached_property
    def by_key(self) -> dict[str, Problem]:
        """Return every problem by its key."""
        return {problem.key: problem for problem in (*self.train, *self.held_out)}

    @cached_property
    def has_answers(self) -> bool:
        """Return whether any problem has an answer."""
        return any(problem.answer for problem in self.by_key.values())


def arithmetic(max_operand: int) -> list[Problem]:
    """Make all additions a+b= with 0 <= a, b <= max_operand."""
    operands = range(max_operand + 1)
    return [Problem(f"{a}+{b}", f"{a}+{b}=", str(a + b)) for a in operands for b in operands]


def column_addition(digits: int, base: int, size: int) -> list[Problem]:
    """Draw `size` different additions of numbers of `digits` digits in base `base`, with their steps.

    The prompts are the same for every seed.
    """
    low, count = base ** (digits - 1), (base - 1) * base ** (digits - 1)
    drawn: dict[tuple[int, int], None] = {}
    for chunk in count_from(0):
        for a, b in words(2 * size, "column addition", digits, base, chunk).reshape(-1, 2).tolist():
            drawn[low + a % count, low + b % count] = None
            if len(drawn) == size:
                return [_in_columns(a, b, base) for a, b in drawn]
    raise AssertionError


def _in_columns(a: int, b: int, base: int) -> Problem:
    key = f"{np.base_repr(a, base)}+{np.base_repr(b, base)}"
    return Problem(key, f"{key}=", np.base_repr(a + b, base), steps=column_steps(f"{key}=", base))


def column_steps(prompt: str, base: int) -> tuple[str, ...]:
    """Return the steps of an addition `a+b=` of numbers with equally many digits, column by column from the right.

    A column has two steps: its sum, `a+b=s`, or `a+b+1=s` after a carry, and the digits of the result so far. The last
    column has only the first one. The answer follows.
    """
    left, right = prompt.removesuffix("=").split("+")
    steps, carry, digits = [], 0, ""
    for x, y in zip(reversed(left), reversed(right), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' * carry}={np.base_repr(total, base)}")
        carry = total // base
        digits = steps[-1][-1] + digits
        steps.append(digits)
    return tuple(steps[:-1])


def make_problem(where: str, fields: Mapping[str, object], chat_template: bool = False) -> Problem:
    """Make the problem in the fields of a JSON object. Raises UserError, with `where` and the wrong field.

    With `chat_template` a prompt may be a list of chat messages. Its text has one line per message.
    """
    messages = None
    if isinstance(fields.get("prompt"), list):
        turns = _messages(where, fields["prompt"], chat_template)
        messages = json.dumps(turns)
        single = len(turns) == 1
        prompt = turns[0]["content"] if single else "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
    else:
        prompt = text_field(where, "prompt", fields.get("prompt"))
    answer = text_field(where, "answer", fields.get("answer", ""))
    if not prompt:
        raise UserError(f"{where}: field 'prompt' is empty; a prompt needs at least one character")
    key = text_field(where, "key", fields.get("key", prompt))
    if not key:
        raise UserError(f"{where}: field 'key' is empty; it names the prompt, leave it out or give a text")
    others = {name: value for name, value in fields.items() if name not in ("prompt", "answer", "key")}
    return Problem(key, prompt, answer, json.dumps(others, sort_keys=True), messages)


def _messages(where: str, value: Any, chat_template: bool) -> list[dict[str, str]]:
    """Return the messages of a prompt. Raises UserError for anything else, or for roles in an impossible order."""
    if not chat_template:
        raise UserError(f"{where}: field 'prompt' is a list of messages; chat_template = true renders it")
    for message in value:
        if not isinstance(message, dict) or {n for n in message if message[n] is not None} != {"role", "content"}:
            raise UserError(f"{where}: field 'prompt': a message must be an object with 'role' and 'content' alone")
        text_field(where, "content", message["content"])
    roles = [str(message["role"]) for message in value]
    if roles[:1] == ["assistant"] or not set(roles) <= ROLES or not {"user", "tool"} & set(roles[-1:]):
        raise UserError(
            f"{where}: field 'prompt' has the roles {shown(', '.join(roles))}; must begin with system or user, go on "
            "with user, assistant or tool, and end with user or tool"
        )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def all_different(entries: Iterable[tuple[str, str, Problem]]) -> list[Problem]:
    """Return the problems of entries (where, name, problem). An error begins with `where` and quotes a `name`.

    Raises UserError for a key or prompt that appears twice, because it could be trained on and held out.
    """
    problems, first = [], dict[tuple[str, str], str]()
    for where, name, problem in entries:
        for what in (("key", problem.key), ("prompt", problem.prompt)):
            if what in first:
                raise UserError(
                    f"{where}: {what[0]} '{shown(what[1])}' is also that of {first[what]}; give each prompt once, with "
                    "its own key"
                )
            first[what] = name
        problems.append(problem)
    return problems


def read_problems(
    path: Path, chat_template: bool = False, template: str | None = None, field: str = FIELD
) -> list[Problem]:
    """Read one problem per line, or per row of a Parquet file. All problems have answers, or none has one.

    With `chat_template` a prompt may be a list of messages. A `template` makes the prompt from the fields of a line.
    Raises UserError, with file and line, for the first mistake.
    """
    lines = [replace(line, fields=_with_answer(line)) for line in read_records(field, path)]
    if template is not None:
        lines = [replace(line, fields={**line.fields, "prompt": _filled(template, line)}) for line in lines]
    answered = any("answer" in line.fields for line in lines)
    for line in lines:
        if answered and "answer" not in line.fields:
            raise UserError(
                f"{line.where}: field 'answer' is missing, and other lines have one; give all lines one, or none"
            )
    return all_different(
        (line.where, f"line {line.number}", make_problem(line.where, line.fields, chat_template)) for line in lines
    )


def _with_answer(line: Line) -> dict[str, Any]:
    """Return the fields of a line. The answer may be in reward_model.ground_truth, as in verl's files."""
    fields, model = line.fields, line.fields.get("reward_model")
    if "answer" in fields or not isinstance(model, dict) or "ground_truth" not in model:
        return fields
    return {**fields, "answer": text_field(line.where, "reward_model.ground_truth", model["ground_truth"])}


def _filled(template: str, line: Line) -> str:
    """Return the template with the fields of a line in it, a field that is no text as JSON."""

    def value(place: re.Match[str]) -> str:
        if place[1] not in line.fields:
            names = shown(", ".join(line.fields))
            raise UserError(f"{line.where}: task.prompt_template asks for {{{place[1]}}}; the line has {names}")
        entry = line.fields[place[1]]
        return entry if isinstance(entry, str) else json.dumps(entry)

    return PLACE.sub(value, template)


def split(problems: Iterable[Problem], num_eval_prompts: int, seed: int) -> Split:
    """Hold out problems, chosen by keys and seed alone. Raises UserError if none is left to train on."""
    shuffled = _shuffled(problems, seed)
    if num_eval_prompts >= len(shuffled):
        raise UserError(
            f"task.num_eval_prompts = {num_eval_prompts}: there are {len(shuffled)} prompts; leave some to train on"
        )
    return Split(shuffled[num_eval_prompts:], shuffled[:num_eval_prompts])


def _shuffled(problems: Iterable[Problem], seed: int) -> tuple[Problem, ...]:
    ordered = sorted(problems, key=lambda p: p.key)
    return tuple(ordered[i] for i in permutation(len(ordered), "held out", seed))


def _of_files(task: JsonlTask, seed: int) -> Split:
    """Return the split of one file, or of a file for training and one for evaluation.

    Raises UserError if a prompt is in both files, or if the second has too few.
    """
    train = _read_once(FIELD, Path(task.path), task)
    if task.eval_path is None:
        return split(train, task.num_eval_prompts, seed)
    held_out = _read_once("task.eval_path", Path(task.eval_path), task)
    files = (task.path, train), (task.eval_path, held_out)
    all_different((file, file, problem) for file, problems in files for problem in problems)
    if task.num_eval_prompts > len(held_out):
        raise UserError(f"task.num_eval_prompts = {task.num_eval_prompts}: {task.eval_path} has {len(held_out)}")
    return Split(_shuffled(train, seed), _shuffled(held_out, seed)[: task.num_eval_prompts])


def choose(problems: tuple[Problem, ...], count: int, seed: int, iteration: int) -> list[Problem]:
    """Choose `count` training problems of an iteration; after a pass over all problems they are shuffled again."""
    chosen = []
    shuffles: dict[int, list[int]] = {}
    for position in range(iteration * count, (iteration + 1) * count):
        epoch, index = divmod(position, len(problems))
        if epoch not in shuffles:
            shuffles[epoch] = permutation(len(problems), "prompts", seed, epoch).tolist()
        chosen.append(problems[shuffles[epoch][index]])
    return chosen


@dataclass(frozen=True)
class Source:
    """Problems of a task, and the user's functions for it."""

    problems: Split
    verifier: UserFunction | None = None  # the task's verifier; None if answers are compared
    step: UserFunction | None = None  # the environment between the model's turns; None if an episode has one turn


def load_source(task: TaskConfig, seed: int, process: UserProcess | None = None) -> Source:
    """Load the problems of a task section, split by `seed`. Raises UserError for the first mistake.

    The task's file runs in `process`, or in a new process if that is None.
    """
    process, functions = process or UserProcess(), dict[str, UserFunction]()
    if isinstance(task, ArithmeticTask):
        problems = arithmetic(task.max_operand)
    elif isinstance(task, ColumnAdditionTask):
        problems = column_addition(task.digits, task.base, task.size)
    elif isinstance(task, JsonlTask):
        return Source(_of_files(task, seed))
    elif isinstance(task, PythonTask):
        functions = _load_file(task, process)
        problems = _read_prompts(functions["prompts"], task.chat_template)
    else:
        functions = load(process, "task.dataset", Path(__file__).with_name("gym_child.py"), _GYM_CALLS)
        row = {"dataset": task.dataset, "settings": task.settings, "seed": task.data_seed, "size": task.size}
        (entries,) = functions["entries"]([row])
        problems = [make_problem(f"{task.dataset}: entry {i}", entry) for i, entry in enumerate(entries)]
    return Source(split(problems, task.num_eval_prompts, seed), functions.get("score"), functions.get("step"))


def _read_once(field: str, path: Path, task: JsonlTask) -> list[Problem]:
    """Return the problems of a file. A second call, after the checks of a run, reads only a changed file."""
    how = task.chat_template, task.prompt_template, field
    try:
        about = path.stat()
    except OSError:
        return read_problems(path, *how)  # says why it cannot be read
    return _read(path, about.st_mtime_ns, about.st_size, how)


@lru_cache(maxsize=2)  # prompts to train on, and to evaluate on
def _read(path: Path, modified: int, size: int, how: tuple[bool, str | None, str]) -> list[Problem]:
    return read_problems(path, *how)


def _load_file(task: PythonTask, process: UserProcess) -> dict[str, UserFunction]:
    file = Path(task.path)
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{FIELD} = {task.path!r}: must be a Python file, NAME.py, that is there")
    functions = load(process, FIELD, file, {"prompts": "prompts", "score": "scores", "step": "step"})
    if "prompts" not in functions:
        raise UserError(f"{FIELD}: {file} has no function prompts; it returns the prompts of the task")
    if task.max_turns > 1 and "step" not in functions:
        raise UserError(f"task.max_turns = {task.max_turns}: {file} has no function step; add it, or take 1")
    if task.max_turns == 1 and "step" in functions:
        raise UserError(f"task.max_turns = 1: {file} has a function step, which needs at least 2 turns; raise it")
    return functions


def _read_prompts(prompts: UserFunction, chat_template: bool) -> list[Problem]:
    """Call `prompts()` twice. Raises UserError if an entry is no prompt, or the two calls differ."""
    first, second = (prompts([{}], seed)[0] for seed in (1, 2))
    if first != second:
        raise UserError(
            f"{prompts.where}: prompts() returned other prompts the second time; it must always return "
            "the same, whatever the global generators hold"
        )
    wheres = [f"{prompts.where}: entry {index} of prompts()" for index in range(len(first))]
    return all_different(
        (where, f"entry {index}", make_problem(where, entry, chat_template))
        for index, (where, entry) in enumerate(zip(wheres, first, strict=True))
    )
