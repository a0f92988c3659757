"""A task section as problems, with the verifier and the environment that come with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.config.tasks import ArithmeticTask, JsonlTask, PythonTask, TaskConfig
from ppo_repro.tasks.problems import Problem, Split, arithmetic, read_jsonl, split
from ppo_repro.tasks.python_task import PythonFile, check_file, load_file, read_prompts
from ppo_repro.tasks.reasoning_gym_task import GymVerifier, load_gym
from ppo_repro.tasks.transcripts import make_transcript


@dataclass(frozen=True)
class Source:
    """The problems of a task, and what else it brings."""

    problems: Split
    verifier: GymVerifier | PythonFile | None  # None for tasks whose answers are compared

    @property
    def environment(self) -> PythonFile | None:
        """What speaks between the model's turns; None where an episode is one turn."""
        return self.verifier if isinstance(self.verifier, PythonFile) and self.verifier.step is not None else None


def load_source(task: TaskConfig, seed: int) -> Source:
    """The problems of a task section, split by `seed`; UserError names whatever is wrong with them."""
    verifier: GymVerifier | PythonFile | None = None
    if isinstance(task, ArithmeticTask):
        problems = arithmetic(task.max_operand)
    elif isinstance(task, JsonlTask):
        problems = read_jsonl(Path(task.path))
    elif isinstance(task, PythonTask):
        verifier = load_file(task)
        problems = read_prompts(verifier)
    else:
        problems, verifier = load_gym(task)
    return Source(split(problems, task.num_eval_prompts, seed), verifier)


def check_source(source: Source, problems: Sequence[Problem]) -> None:
    """UserError where the functions of a Python task answer one input in two ways: the answer, and nothing."""
    if isinstance(source.verifier, PythonFile):
        rows = [(p, turn) for p in problems[:2] for turn in (p.answer, "")]
        check_file(source.verifier, [make_transcript(p.key, p.prompt, p.answer, p.fields, [turn]) for p, turn in rows])
