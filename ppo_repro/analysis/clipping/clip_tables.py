"""What did the clip do in a run? `ppo-repro analyse clipping RUN` prints it.

One iteration is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.clipping.clip_steps import clip_bucket, clip_step
from ppo_repro.analysis.clipping.update_rows import load_iterations
from ppo_repro.base.errors import UserError
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import Parser, tell

# the columns of clip_step with the estimates of KL
ESTIMATES = {"k1": "kl_k1", "k3": "kl_k3"}


@dataclass(frozen=True)
class ClipTables:
    """Tables of `clip_step` and `clip_bucket` over all iterations."""

    clip_step: pd.DataFrame
    clip_bucket: pd.DataFrame


def clip_tables(
    run_dir: Path | str, *, iterations: Sequence[int] | None = None, band: tuple[float, float] | None = None
) -> ClipTables:
    """Return all tables of a run; `band` (low, high) replaces the run's own clip range.

    Raises UserError if records are missing, or if the run clips nothing and there is no band.
    """
    steps, buckets = [], []
    for item in load_iterations(run_dir, iterations=iterations, band=band):
        steps.append(clip_step(item))
        buckets.append(clip_bucket(item))
    return ClipTables(pd.concat(steps, ignore_index=True), pd.concat(buckets, ignore_index=True))


def early_stop(clip_step: pd.DataFrame, target_kl: float) -> pd.DataFrame:
    """Return the steps of each iteration up to an early stop, at the first step whose estimate exceeds `target_kl`.

    The frame has one row per iteration and estimate, from the rows `all` of `clip_step`. The estimates (nats) are k1 =
    mean(old - new) and k3. steps_taken includes the step that measured the estimate; without a stop it counts all
    recorded steps. The records cannot say what would have followed a stop. Raises UserError for a target that is not
    positive.
    """
    if not 0.0 < target_kl < np.inf:
        raise UserError(f"target_kl = {target_kl:g}: must be a positive number (nats per token)")
    whole = clip_step[(clip_step["subset"] == "all") & (clip_step["n_tok"] > 0)]
    table = []
    for iteration, group in whole.sort_values("step").groupby("iteration", sort=True):
        for estimate, name in ESTIMATES.items():
            above = np.flatnonzero(group[name].to_numpy() > target_kl)
            taken = int(above[0]) + 1 if len(above) else len(group)
            row = {"stopped": bool(len(above)), "steps_taken": taken, "steps": len(group)}
            table.append({"iteration": iteration, "estimate": estimate, **row})
    return pd.DataFrame(table)


def overview(tables: ClipTables, early_stop_kl: float | None = None) -> list[str]:
    """Return the printed lines: shares of clipped tokens, ratios, KL, and, if `early_stop_kl` is set, early stops.

    A run at the record level `lean` has no line about the surrogate mass.
    """
    steps = tables.clip_step[(tables.clip_step["subset"] == "all") & (tables.clip_step["n_tok"] > 0)]

    def mean(name: str) -> float:
        return float(np.average(steps[name], weights=steps["n_tok"]))

    mass = float(steps["gm_clip"].mean())
    lines = [
        f"token visits {steps['n_tok'].sum():,} in {len(steps)} steps of {steps['iteration'].nunique()} iterations",
        f"outside the band {mean('band_out'):.3%} = clip_high {mean('clip_high'):.3%} + clip_low {mean('clip_low'):.3%}"
        f" + wrong_high {mean('wrong_high'):.3%} + wrong_low {mean('wrong_low'):.3%}"
        f" + no advantage {mean('out_without_advantage'):.3%}",
        f"gradient removed {mean('grad_zero'):.3%} of tokens; of a step {steps['grad_zero'].min():.1%} to "
        f"{steps['grad_zero'].max():.1%}; without any step taken (clip_floor) {mean('clip_floor'):.3%}",
        *([f"gradient removed: {mass:.1%} of the surrogate mass (mean of steps)"] if not math.isnan(mass) else []),
        f"largest ratio {steps['r_max'].max():.3g}, smallest {steps['r_min'].min():.3g}; beyond twice the range "
        f"{mean('beyond_twice'):.3%}",
        f"KL(anchor || new) of a step, token mean: k1 {mean('kl_k1'):.2e}, k3 {mean('kl_k3'):.2e} nats",
    ]
    if early_stop_kl is not None:
        for estimate, group in early_stop(tables.clip_step, early_stop_kl).groupby("estimate", sort=False):
            lines.append(
                f"early stop at {early_stop_kl:g} by {estimate}: {group['stopped'].sum()} of {len(group)} iterations, "
                f"after {group['steps_taken'].mean():.1f} of {group['steps'].mean():.1f} steps"
            )
    return lines


def main(argv: Sequence[str]) -> None:
    """Print the overview of a run's clipping."""
    parser = Parser(prog="ppo-repro analyse clipping", description="What did the clip do in a run?")
    parser.add_argument("run", type=run_named, help="folder of a run")
    parser.add_argument("--clip-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="in place of the run's own")
    parser.add_argument("--early-stop-kl", type=float, help="where this target would have stopped, nats per token")
    arguments = parser.parse_args(argv)
    band = None if arguments.clip_range is None else (arguments.clip_range[0], arguments.clip_range[1])
    tell("\n".join(overview(clip_tables(arguments.run, band=band), arguments.early_stop_kl)))
