"""A task section as problems, with the verifier and the environment that come with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_repro.config.tasks import (
    ArithmeticTask,
    ColumnAdditionTask,
    JsonlTask,
    PythonTask,
    ReasoningGymTask,
    TaskConfig,
)
from ppo_repro.errors import UserError
from ppo_repro.output import shown
from ppo_repro.tasks.problems import (
    Problem,
    Split,
    all_different,
    arithmetic,
    column_addition,
    make_problem,
    read_jsonl,
    split,
)
from ppo_repro.tasks.user_code import CALL_SECONDS, UserFunction, UserProcess, load, require_repeats

FIELD = "task.path"
_SECONDS_PER_TRANSCRIPT = 30.0  # at least CALL_SECONDS for a call of `score`


@dataclass(frozen=True)
class GymVerifier:
    """The verifier of a data set of reasoning-gym."""

    score: UserFunction
    data_seed: int

    def scores(self, keys: Sequence[str], answers: Sequence[str | None]) -> list[float]:
        """The data set's scores of the answers, usually 0 to 1; None is no answer. UserError if it raises."""
        rows = [{"key": key, "answer": answer} for key, answer in zip(keys, answers, strict=True)]
        return self.score(rows, [f"; prompt key '{shown(key)}'" for key in keys], self.data_seed)


@dataclass(frozen=True)
class PythonFile:
    """The functions of a task's file; None for one that it does not have."""

    prompts: UserFunction
    score: UserFunction | None
    step: UserFunction | None

    def scores(self, transcripts: Sequence[Mapping[str, Any]], seed: int = 0) -> list[float]:
        """The numbers of one call of `score`, one for each `transcript`."""
        assert self.score is not None
        seconds = max(CALL_SECONDS, _SECONDS_PER_TRANSCRIPT * len(transcripts))
        found: list[float] = self.score([{"transcripts": list(transcripts)}], [""], seed, seconds)[0]
        return found

    def next_turn(self, transcript: Mapping[str, Any], seed: int = 0) -> str | None:
        """What the environment says next, None at the end of the episode."""
        assert self.step is not None
        found: str | None = self.step([transcript], [f"; prompt key '{shown(transcript['key'])}'"], seed)[0]
        return found


def transcript_of(problem: Problem, turns: Sequence[str]) -> dict[str, Any]:
    """What `make_transcript` in the child makes a transcript of; `turns` begin with the model's."""
    return {
        "key": problem.key,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "fields": problem.fields,
        "turns": list(turns),
    }


@dataclass(frozen=True)
class Source:
    """The problems of a task, and what else it brings."""

    problems: Split
    verifier: GymVerifier | PythonFile | None  # None for tasks whose answers are compared

    @property
    def environment(self) -> PythonFile | None:
        """What speaks between the model's turns; None if an episode is one turn."""
        return self.verifier if isinstance(self.verifier, PythonFile) and self.verifier.step is not None else None


def load_source(task: TaskConfig, seed: int, process: UserProcess | None = None) -> Source:
    """The problems of a task section, split by `seed`; UserError names whatever is wrong with them.

    `process`: where a task's file runs; None for a process of its own.
    """
    process = process or UserProcess()
    verifier: GymVerifier | PythonFile | None = None
    if isinstance(task, ArithmeticTask):
        problems = arithmetic(task.max_operand)
    elif isinstance(task, ColumnAdditionTask):
        problems = column_addition(task.digits, task.base, task.size)
    elif isinstance(task, JsonlTask):
        problems = read_jsonl(Path(task.path), task.chat_template)
    elif isinstance(task, PythonTask):
        verifier = _load_file(task, process)
        problems = _read_prompts(verifier, task.chat_template)
    else:
        problems, verifier = _load_gym(task, process)
    return Source(split(problems, task.num_eval_prompts, seed), verifier)


def _load_gym(task: ReasoningGymTask, process: UserProcess) -> tuple[list[Problem], GymVerifier]:
    calls = {"entries": "prompts", "score": "keywords"}
    functions = load(process, "task.dataset", Path(__file__).with_name("gym_child.py"), list(calls), calls)
    row = {"dataset": task.dataset, "settings": task.settings, "seed": task.data_seed, "size": task.size}
    (entries,) = functions["entries"]([row], [""], task.data_seed)
    problems = [make_problem(f"{task.dataset}: entry {i}", entry) for i, entry in enumerate(entries)]
    return problems, GymVerifier(functions["score"], task.data_seed)


def _load_file(task: PythonTask, process: UserProcess) -> PythonFile:
    file = Path(task.path)
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{FIELD} = {task.path!r}: must be a Python file, NAME.py, that is there")
    calls = {"prompts": "prompts", "score": "scores", "step": "step"}
    found = load(process, FIELD, file, list(calls), calls)
    if "prompts" not in found:
        raise UserError(f"{FIELD}: {file} has no function prompts; it returns the prompts of the task")
    if task.max_turns > 1 and "step" not in found:
        raise UserError(f"task.max_turns = {task.max_turns}: {file} has no function step; add it, or take 1")
    if task.max_turns == 1 and "step" in found:
        raise UserError(f"task.max_turns = 1: {file} has a function step, which needs at least 2 turns; raise it")
    return PythonFile(found["prompts"], found.get("score"), found.get("step"))


def _read_prompts(of: PythonFile, chat_template: bool) -> list[Problem]:
    """What `prompts()` returns; UserError names an entry that is no prompt, or two calls that differ."""
    first, second = (of.prompts([{}], [""], seed)[0] for seed in (1, 2))
    if first != second:
        raise UserError(
            f"{of.prompts.where}: prompts() returned other prompts the second time; it must always return "
            "the same, whatever the global generators hold"
        )
    named = []
    for index, entry in enumerate(first):
        where = f"{of.prompts.where}: entry {index} of prompts()"
        if isinstance(entry, str):
            raise UserError(f"{where}: {entry}")
        named.append((where, f"entry {index}", make_problem(where, entry, chat_template)))
    return all_different(named)


def check_source(source: Source, problems: Sequence[Problem]) -> None:
    """Call `score` and `step` of a Python task twice on a few transcripts; UserError if they answer differently."""
    of = source.verifier
    if not isinstance(of, PythonFile):
        return
    rows = [transcript_of(problem, [turn]) for problem in problems[:2] for turn in (problem.answer, "")]
    described = [f"prompt key '{shown(row['key'])}', last turn '{shown(row['turns'][-1])}'" for row in rows]
    if of.score is not None:
        require_repeats(of.score, rows, described, of.scores)
    if of.step is not None:
        require_repeats(of.step, rows, described, lambda some, seed: [of.next_turn(row, seed) for row in some])
