"""Prompts from reasoning-gym, and the verifier of its data set."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ppo_repro.config.tasks import ReasoningGymTask
from ppo_repro.errors import UserError
from ppo_repro.mistakes import did_you_mean
from ppo_repro.output import shown
from ppo_repro.tasks import process_state
from ppo_repro.tasks.containment import contained
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.process_state import ProcessState
from ppo_repro.tasks.user_functions import NotANumber, described, number

PACKAGE = "reasoning-gym"


@dataclass(frozen=True)
class GymVerifier:
    """A data set and its entries, by the key of the problem."""

    name: str
    dataset: Any  # reasoning_gym.dataset.ProceduralDataset
    entries: Mapping[str, dict[str, Any]]
    state: ProcessState
    seed: int


def load_gym(task: ReasoningGymTask) -> tuple[list[Problem], GymVerifier]:
    """The entries of the data set, each question once; UserError for an unknown name or setting."""

    def describe(error: BaseException) -> str:
        return _refusal(task, error)

    with contained() as inside:
        dataset = inside.call(lambda: _dataset(task), describe)
        process_state.seed_generators(task.data_seed)
        entries = inside.call(lambda: [dataset[index] for index in range(task.size)], describe)
        state = process_state.read()
    problems: dict[str, Problem] = {}
    by_key: dict[str, dict[str, Any]] = {}
    for index, entry in enumerate(entries):
        question, answer = entry["question"], entry["answer"]
        if question in problems:
            continue
        problems[question] = Problem(f"{task.dataset}-{task.data_seed}-{index}", question, str(answer or ""))
        by_key[problems[question].key] = entry
    return list(problems.values()), GymVerifier(task.dataset, dataset, by_key, state, task.data_seed)


def _dataset(task: ReasoningGymTask) -> Any:
    try:
        with warnings.catch_warnings():  # of the syntax of what it imports, where that is compiled for the first time
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        reason = "" if error.name == "reasoning_gym" else f" ({error})"
        raise UserError(
            f"task.kind = reasoning_gym: needs {PACKAGE}{reason}; install it: pip install 'ppo-repro[tasks]'"
        ) from error
    if task.dataset not in DATASETS:
        names = sorted(DATASETS)
        meant = did_you_mean(task.dataset, names)
        raise UserError(f"task.dataset = {task.dataset!r}: must be one of {', '.join(names)}{meant}")
    known = sorted({field.name for field in fields(DATASETS[task.dataset][1])} - {"size"})
    for name in task.settings:
        if name not in known:
            has = f"it has {', '.join(known)}{did_you_mean(name, known)}"
            raise UserError(f"task.settings.{name}: unknown setting of {task.dataset}; {has}")
    return create_dataset(task.dataset, size=task.size, **{"seed": 0, **task.settings})


def _refusal(task: ReasoningGymTask, error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"task.settings: {task.dataset} refuses {shown(repr(task.settings))} ({described(error)})"


def gym_scores(verifier: GymVerifier, keys: Sequence[str], answers: Sequence[str | None]) -> list[float]:
    """The data set's scores of the answers, usually 0 to 1; None is no answer. UserError where it raises."""

    def ask(key: str, answer: str | None) -> float:
        return number(verifier.dataset.score_answer(answer, verifier.entries[key]))

    values = []
    for key, answer in zip(keys, answers, strict=True):

        def describe(error: BaseException, key: str = key) -> str:
            what = f"returned {error}" if isinstance(error, NotANumber) else f"raised {described(error)}"
            return f"task.dataset = {verifier.name}: its verifier {what}; prompt key '{shown(key)}'"

        with contained(verifier.state) as inside:
            process_state.seed_generators(verifier.seed)  # of each answer alike, whatever came before it
            values.append(inside.call(lambda: ask(key, answer), describe))  # noqa: B023 - called at once
    return values
