"""Implement `ppo-repro analyse clipping`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import pandas as pd

from ppo_repro.analysis.clipping import RunClipping, clip_tables, early_stop, over_all_steps, require_target_kl
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import print_result


def add_options(option: Callable[..., argparse.Action]) -> None:
    """Add the options of the command."""
    option("run", type=run_named, help="folder of a run")
    option("--clip-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="the range that replaces the run's own")
    option("--early-stop-kl", type=float, help="the target that would have stopped epochs, nats per token")


def command(arguments: argparse.Namespace) -> None:
    """Print shares of clipped tokens, ratios and KL of a run, and where an early stop would have been."""
    target = arguments.early_stop_kl
    if target is not None:
        require_target_kl(target)  # before the whole run is read
    band = None if arguments.clip_range is None else (arguments.clip_range[0], arguments.clip_range[1])
    steps = clip_tables(arguments.run, band=band).by_step
    numbers = over_all_steps(steps)
    value, lines = numbers._asdict(), _lines(numbers)
    if target is not None:
        stops = early_stop(steps, target)
        value["early_stops"] = stops.to_dict("records")
        lines += _early_stop_lines(stops, target)
    print_result(arguments.json, value, lines)


def _lines(n: RunClipping) -> list[str]:
    """Return the printed lines; a run at the record level `lean` has no line about the surrogate mass."""
    return [
        f"token visits {n.n_tokens:,} in {n.n_steps} steps of {n.n_iterations} iterations",
        f"outside the band {n.outside:.3%} = clip_high {n.clip_high:.3%} + clip_low {n.clip_low:.3%}"
        f" + wrong_high {n.wrong_high:.3%} + wrong_low {n.wrong_low:.3%}"
        f" + no advantage {n.outside_without_advantage:.3%}",
        f"gradient removed {n.removed:.3%} of tokens; of a step {n.removed_min:.1%} to {n.removed_max:.1%}; "
        f"without any step taken (clip_floor) {n.clip_floor:.3%}",
        *(
            []
            if math.isnan(n.removed_mass)
            else [f"gradient removed: {n.removed_mass:.1%} of the surrogate mass (mean of steps)"]
        ),
        f"largest ratio {n.ratio_max:.3g}, smallest {n.ratio_min:.3g}; beyond twice the range {n.beyond_twice:.3%}",
        f"KL(anchor || new) of a step, token mean: k1 {n.k1:.2e}, k3 {n.k3:.2e} nats",
    ]


def _early_stop_lines(stops: pd.DataFrame, target_kl: float) -> list[str]:
    return [
        f"early stop at {target_kl:g} by {estimate}: {group['stopped'].sum()} of {len(group)} iterations, "
        f"after {group['steps_taken'].mean():.1f} of {group['steps'].mean():.1f} steps"
        for estimate, group in stops.groupby("estimate", sort=False)
    ]
