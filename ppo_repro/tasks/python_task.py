"""A task in the user's Python file: prompts, verifier and the environment's turns, called in containment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_repro.config.tasks import PythonTask
from ppo_repro.errors import UserError
from ppo_repro.output import shown
from ppo_repro.tasks import process_state
from ppo_repro.tasks.containment import TookTooLong, contained
from ppo_repro.tasks.problems import Problem, all_different, make_problem
from ppo_repro.tasks.process_state import ProcessState
from ppo_repro.tasks.transcripts import Transcript
from ppo_repro.tasks.user_functions import ALLOWED, NotANumber, described, first_line, line_of, module_of, number

FIELD = "task.path"
STEP_SECONDS = 300.0  # of wall time for a call of `step`, far more than one that is taken for every turn can use


@dataclass(frozen=True)
class PythonFile:
    """The functions of a task's file; None for one that it does not have."""

    file: Path
    prompts: Callable[[], object]
    score: Callable[[list[Transcript]], object] | None
    step: Callable[[Transcript], object] | None
    state: ProcessState  # of the process as the file left it; every call begins in it

    def where(self, error: BaseException | None, function: Callable[..., object]) -> str:
        """Field, file and line: of the error, or where the function begins."""
        line = (0 if error is None else line_of(error, self.file)) or first_line(function, self.file)
        return f"{FIELD}: {self.file}{f':{line}' if line else ''}"


def load_file(task: PythonTask) -> PythonFile:
    """The functions of the file; UserError where it cannot be loaded or lacks what the task asks for."""
    file = Path(task.path)
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{FIELD} = {task.path!r}: must be a Python file, NAME.py, that is there")

    def describe(error: BaseException) -> str:
        line = line_of(error, file)
        return f"{FIELD}: {file}{f':{line}' if line else ''} fails to load ({described(error)})"

    def functions() -> dict[str, Any]:
        module = module_of(FIELD, file)
        return {name: getattr(module, name, None) for name in ("prompts", "score", "step")}

    with contained() as inside:
        found = inside.call(functions, describe)
        state = process_state.read()
    for name, function in found.items():
        if function is not None and not callable(function):
            raise UserError(f"{FIELD}: {file}: {name} is no function; make it one or rename it")
    if found["prompts"] is None:
        raise UserError(f"{FIELD}: {file} has no function prompts; it returns the prompts of the task")
    if task.max_turns > 1 and found["step"] is None:
        raise UserError(f"task.max_turns = {task.max_turns}: {file} has no function step; add it, or take 1")
    if task.max_turns == 1 and found["step"] is not None:
        raise UserError(f"task.max_turns = 1: {file} has a function step, which needs at least 2 turns; raise it")
    return PythonFile(file, found["prompts"], found["score"], found["step"], state)


def read_prompts(of: PythonFile) -> list[Problem]:
    """What `prompts()` returns; UserError names an entry that is no prompt, or two calls that differ."""
    first, second = (_prompts(of, seed) for seed in (1, 2))
    if first != second:
        raise UserError(
            f"{of.where(None, of.prompts)}: prompts() returned other prompts the second time; it must always return "
            "the same, whatever the global generators hold"
        )
    return first


def _prompts(of: PythonFile, seed: int) -> list[Problem]:
    def describe(error: BaseException) -> str:
        return f"{of.where(error, of.prompts)}: prompts() raised {described(error)}"

    def collect() -> list[object]:
        entries = of.prompts()
        if isinstance(entries, str | Mapping) or not isinstance(entries, Iterable):
            raise TypeError(f"it must return a list of prompts, not a {type(entries).__name__}")
        return [dict(entry) if isinstance(entry, Mapping) else entry for entry in entries]

    with contained(of.state) as inside:
        process_state.seed_generators(seed)
        entries = inside.call(collect, describe)
    where = of.where(None, of.prompts)
    named = ((f"{where}: entry {index} of prompts()", f"entry {index}", entry) for index, entry in enumerate(entries))
    return all_different((place, name, _problem(place, entry)) for place, name, entry in named)


def _problem(where: str, entry: object) -> Problem:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: is a {type(entry).__name__}; must be a dict with 'prompt', 'answer' and others")
    try:
        # through JSON, so that whatever was returned cannot be changed later
        fields = json.loads(json.dumps(entry, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: has a value that JSON does not have ({shown(str(error))})") from error
    return make_problem(where, {"answer": "", **fields})


def scores(of: PythonFile, transcripts: Sequence[Transcript], seed: int | None = None) -> list[float]:
    """The numbers of one call of `score`, in this order; UserError where it raises or returns anything else."""
    function = of.score
    assert function is not None

    def compute() -> list[float]:
        returned = function(list(transcripts))
        if isinstance(returned, str | Mapping) or not isinstance(returned, Iterable):
            raise _WrongAnswer(f"returned a {type(returned).__name__}; must be a list, one number for each transcript")
        values = list(returned)
        if len(values) != len(transcripts):
            raise _WrongAnswer(f"returned {len(values)} numbers for {len(transcripts)} transcripts")
        return [_checked(value, transcript) for value, transcript in zip(values, transcripts, strict=True)]

    def describe(error: BaseException) -> str:
        what = str(error) if isinstance(error, _WrongAnswer) else f"raised {described(error)}"
        return f"{of.where(error, function)}: score {what}"

    with contained(of.state) as inside:
        if seed is not None:
            process_state.seed_generators(seed)
        return inside.call(compute, describe)


class _WrongAnswer(Exception):
    """A function returned what it must not; the message says what."""


def _checked(value: object, transcript: Transcript) -> float:
    try:
        return number(value)
    except NotANumber as error:
        message = f"returned {error} for prompt key '{shown(transcript.key)}'; must be {ALLOWED}"
        raise _WrongAnswer(message) from None


def take_step(of: PythonFile, transcript: Transcript, seed: int | None = None) -> str | None:
    """What the environment says next, None where the episode is over; UserError where `step` returns no text."""
    function = of.step
    assert function is not None

    def compute() -> str | None:
        said = function(transcript)
        if said is not None and not isinstance(said, str):
            raise _WrongAnswer(f"returned {shown(repr(said))} of type {type(said).__name__}; must be a text or None")
        if said is not None and not said:
            raise _WrongAnswer("returned an empty text; must be None where the episode is over")
        return None if said is None else str(said)

    def describe(error: BaseException) -> str:
        what = str(error) if isinstance(error, _WrongAnswer) else f"raised {described(error)}"
        if isinstance(error, TookTooLong):
            what = f"gave {error}; make it end"
        return f"{of.where(error, function)}: step {what}; prompt key '{shown(transcript.key)}'"

    with contained(of.state) as inside:
        if seed is not None:
            process_state.seed_generators(seed)
        return inside.call(compute, describe, STEP_SECONDS)


def check_file(of: PythonFile, transcripts: Sequence[Transcript]) -> None:
    """Call `score` and `step` twice on the same transcripts; UserError where they answer differently.

    The second time in the opposite order and with other seeds of the global generators.
    """
    if of.score is not None:
        first = scores(of, transcripts, seed=1)
        second = scores(of, transcripts[::-1], seed=2)[::-1]
        for transcript, one, other in zip(transcripts, first, second, strict=True):
            _require_same(of, of.score, "score", transcript, one, other)
    if of.step is not None:
        said = [take_step(of, transcript, seed=1) for transcript in transcripts]
        again = [take_step(of, transcript, seed=2) for transcript in transcripts[::-1]][::-1]
        for transcript, before, after in zip(transcripts, said, again, strict=True):
            _require_same(of, of.step, "step", transcript, before, after)


def _require_same(
    of: PythonFile, function: Callable[..., object], name: str, transcript: Transcript, one: object, other: object
) -> None:
    if one != other:
        raise UserError(
            f"{of.where(None, function)}: {name} returned {shown(repr(one))} and then {shown(repr(other))} for "
            f"the same transcript (prompt key '{shown(transcript.key)}', last turn '{shown(transcript.last)}'); "
            "it must follow from the transcript alone"
        )
