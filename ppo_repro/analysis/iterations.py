"""Choose the iterations of a recorded run that an analysis reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.records.manifest import Manifest, require_responses


def chosen_iterations(recorded: Manifest, iterations: Sequence[int] | None) -> Sequence[int]:
    """Return `iterations`, or all recorded iterations if None. Raises UserError for an empty list."""
    if iterations is not None and not len(iterations):
        raise UserError("iterations = []: names no iteration; leave it out for all iterations")
    return range(recorded.num_iterations) if iterations is None else iterations


def own_iterations(run_dir: Path | str, recorded: Manifest, iterations: Sequence[int] | None) -> Sequence[int]:
    """Return `iterations`; if None, all iterations that a language run computed itself, with its own settings.

    Raises UserError for a run without responses, for an empty list, and for an iteration of a fork's origin.
    """
    require_responses(run_dir, recorded)
    computed = recorded.own_iterations
    chosen = computed if iterations is None else chosen_iterations(recorded, iterations)
    if copied := [i for i in chosen if 0 <= i < computed.start]:
        whose = "is of the run that was forked, which has settings of its own; give the folder of that run"
        raise UserError(f"{run_dir}: iteration {copied[0]} {whose}")
    return chosen
