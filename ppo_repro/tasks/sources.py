"""A task section as problems, with the verifier and the environment that come with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppo_repro.config.tasks import (
    ArithmeticTask,
    ColumnAdditionTask,
    JsonlTask,
    PythonTask,
    TaskConfig,
)
from ppo_repro.errors import UserError
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
from ppo_repro.tasks.user_code import UserFunction, UserProcess, load

FIELD = "task.path"
_OF_GYM = {"entries": "prompts", "score": "keywords"}


@dataclass(frozen=True)
class Source:
    """The problems of a task, and what else it brings."""

    problems: Split
    verifier: UserFunction | None = None  # the task's own; None where answers are compared
    step: UserFunction | None = None  # what speaks between the model's turns; None if an episode is one turn


def load_source(task: TaskConfig, seed: int, process: UserProcess | None = None) -> Source:
    """The problems of a task section, split by `seed`; UserError names whatever is wrong with them.

    `process`: where a task's file runs; None for a process of its own.
    """
    process, functions = process or UserProcess(), dict[str, UserFunction]()
    if isinstance(task, ArithmeticTask):
        problems = arithmetic(task.max_operand)
    elif isinstance(task, ColumnAdditionTask):
        problems = column_addition(task.digits, task.base, task.size)
    elif isinstance(task, JsonlTask):
        problems = read_jsonl(Path(task.path), task.chat_template)
    elif isinstance(task, PythonTask):
        functions = _load_file(task, process)
        problems = _read_prompts(functions["prompts"], task.chat_template)
    else:
        functions = load(process, "task.dataset", Path(__file__).with_name("gym_child.py"), _OF_GYM)
        row = {"dataset": task.dataset, "settings": task.settings, "seed": task.data_seed, "size": task.size}
        (entries,) = functions["entries"]([row])
        problems = [make_problem(f"{task.dataset}: entry {i}", entry) for i, entry in enumerate(entries)]
    return Source(split(problems, task.num_eval_prompts, seed), functions.get("score"), functions.get("step"))


def _load_file(task: PythonTask, process: UserProcess) -> dict[str, UserFunction]:
    file = Path(task.path)
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{FIELD} = {task.path!r}: must be a Python file, NAME.py, that is there")
    found = load(process, FIELD, file, {"prompts": "prompts", "score": "scores", "step": "step"})
    if "prompts" not in found:
        raise UserError(f"{FIELD}: {file} has no function prompts; it returns the prompts of the task")
    if task.max_turns > 1 and "step" not in found:
        raise UserError(f"task.max_turns = {task.max_turns}: {file} has no function step; add it, or take 1")
    if task.max_turns == 1 and "step" in found:
        raise UserError(f"task.max_turns = 1: {file} has a function step, which needs at least 2 turns; raise it")
    return found


def _read_prompts(prompts: UserFunction, chat_template: bool) -> list[Problem]:
    """What `prompts()` returns; UserError names an entry that is no prompt, or two calls that differ."""
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
