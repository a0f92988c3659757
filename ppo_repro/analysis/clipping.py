"""What did the clip do in a run? Tables by step and by bucket, numbers of the whole run, early stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis.clip_buckets import clip_bucket
from ppo_repro.analysis.clip_steps import ESTIMATES, clip_step
from ppo_repro.analysis.visits import ALL, load_iterations
from ppo_repro.base.errors import UserError


@dataclass(frozen=True)
class ClipTables:
    """Tables of `clip_step` and `clip_bucket` over all iterations."""

    by_step: pd.DataFrame
    by_bucket: pd.DataFrame


def clip_tables(
    run_dir: Path | str, *, iterations: Sequence[int] | None = None, band: tuple[float, float] | None = None
) -> ClipTables:
    """Return all tables of a run; `band` (low, high) replaces the run's clip range.

    Raises UserError if records are missing, or if the run clips nothing and there is no band.
    """
    steps, buckets = [], []
    for loaded in load_iterations(run_dir, iterations=iterations, band=band):
        steps.append(clip_step(loaded))
        buckets.append(clip_bucket(loaded))
    return ClipTables(pd.concat(steps, ignore_index=True), pd.concat(buckets, ignore_index=True))


def _steps_taken(by_step: pd.DataFrame) -> pd.DataFrame:
    """Return the rows `all` of the steps that the policy took."""
    return by_step[(by_step["subset"] == ALL) & (by_step["n_tokens"] > 0)]


def require_target_kl(target_kl: float) -> None:
    """Raise UserError for a target of an early stop that is not positive."""
    if not 0.0 < target_kl < np.inf:
        raise UserError(f"target_kl = {target_kl:g}: must be a positive number (nats per token)")


class EarlyStop(NamedTuple):
    """Where one estimate would have stopped the epochs of an iteration: a row of `early_stop`."""

    iteration: int
    estimate: str  # of ESTIMATES
    stopped: bool
    steps_taken: int  # with the step that measured the estimate; all recorded steps without a stop
    steps: int


def early_stop(by_step: pd.DataFrame, target_kl: float) -> pd.DataFrame:
    """Return an `EarlyStop` per iteration and estimate: it stops at the first step whose estimate exceeds `target_kl`.

    The rows `all` of `clip_step` have the `KlEstimates`. The records cannot say what would have followed a stop. Raises
    UserError for a target that is not positive.
    """
    require_target_kl(target_kl)
    stops = []
    for _, group in _steps_taken(by_step).sort_values("step").groupby("iteration", sort=True):
        iteration = int(group["iteration"].iloc[0])
        for estimate in ESTIMATES:
            above = np.flatnonzero(group[estimate].to_numpy() > target_kl)
            taken = int(above[0]) + 1 if len(above) else len(group)
            stops.append(EarlyStop(iteration, estimate, bool(len(above)), taken, len(group)))
    return pd.DataFrame(stops, columns=EarlyStop._fields)


class RunClipping(NamedTuple):
    """What the clip did in a whole run. A mean without further words is over the token visits."""

    n_tokens: int  # visits: a token counts once in each step
    n_steps: int
    n_iterations: int
    outside: float  # a field for each of FLAGS
    clip_high: float
    clip_low: float
    wrong_high: float
    wrong_low: float
    outside_without_advantage: float
    clip_dual: float
    removed: float
    beyond_twice: float
    clip_floor: float
    k1: float
    k3: float
    removed_min: float  # of a step
    removed_max: float
    ratio_min: float
    ratio_max: float
    removed_mass: float  # mean over the steps; NaN at the record level `lean`


def over_all_steps(by_step: pd.DataFrame) -> RunClipping:
    """Return the numbers of a whole run, from the rows `all` of `clip_step`."""
    steps = _steps_taken(by_step)

    def mean(name: str) -> float:
        return float(np.average(steps[name], weights=steps["n_tokens"]))

    return RunClipping(
        n_tokens=int(steps["n_tokens"].sum()),
        n_steps=len(steps),
        n_iterations=steps["iteration"].nunique(),
        outside=mean("outside"),
        clip_high=mean("clip_high"),
        clip_low=mean("clip_low"),
        wrong_high=mean("wrong_high"),
        wrong_low=mean("wrong_low"),
        outside_without_advantage=mean("outside_without_advantage"),
        clip_dual=mean("clip_dual"),
        removed=mean("removed"),
        beyond_twice=mean("beyond_twice"),
        clip_floor=mean("clip_floor"),
        k1=mean("k1"),
        k3=mean("k3"),
        removed_min=float(steps["removed"].min()),
        removed_max=float(steps["removed"].max()),
        ratio_min=float(steps["ratio_min"].min()),
        ratio_max=float(steps["ratio_max"].max()),
        removed_mass=float(steps["removed_mass"].mean()),
    )
