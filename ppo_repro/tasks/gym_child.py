"""reasoning-gym in the child process: the entries of a data set, and its verifier."""

from __future__ import annotations

import warnings
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import shown
from ppo_repro.user.child import seed_generators
from ppo_repro.user.file import described

_dataset: Any = None
_entries: dict[str, dict[str, Any]] = {}  # by key


def entries(dataset: str, settings: dict[str, Any], seed: int, size: int) -> list[dict[str, str]]:
    """Return `size` entries of the data set, each question once. Raises UserError for an unknown name or setting."""
    global _dataset
    try:
        with warnings.catch_warnings():  # about the syntax of the package's own files, when they are first compiled
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym.factory import create_dataset
    except ImportError as error:
        reason = "" if error.name == "reasoning_gym" else f" ({error})"
        raise UserError(
            f"task.kind = reasoning_gym: needs reasoning-gym{reason}; install it: pip install 'ppo-repro[tasks]'"
        ) from error
    seed_generators(seed)
    try:
        _dataset = create_dataset(dataset, size=size, **{**settings, "seed": seed})
        items = [_dataset[index] for index in range(size)]
    except Exception as error:
        raise UserError(
            f"task.dataset = {dataset!r}: reasoning-gym refuses it, with task.settings = {shown(repr(settings))} "
            f"({described(error)})"
        ) from error
    problems: dict[str, dict[str, str]] = {}
    for index, entry in enumerate(items):
        question, key = entry["question"], f"{dataset}-{seed}-{index}"
        if question not in problems:
            problems[question] = {"prompt": question, "answer": str(entry["answer"] or ""), "key": key}
            _entries[key] = entry
    return list(problems.values())


def score(key: str, answer: str | None) -> float:
    """Return the data set's score of an answer to entry `key`, usually from 0 to 1; None stands for no answer."""
    return float(_dataset.score_answer(answer, _entries[key]))
