"""What did the clip do in a run? `python -m ppo_repro.analysis.clipping RUN` prints it.

One iteration is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.clipping.step import clip_bucket, clip_step
from ppo_repro.analysis.clipping.update_rows import load_iterations, recorded_config
from ppo_repro.analysis.program import program
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import Parser, tell


@dataclass(frozen=True)
class ClipTables:
    """The tables of the clip analysis, see `clip_step` and `clip_bucket`."""

    clip_step: pd.DataFrame
    clip_bucket: pd.DataFrame


def clip_tables(
    run_dir: Path | str, *, iterations: Sequence[int] | None = None, band: tuple[float, float] | None = None
) -> ClipTables:
    """Return all tables of a run; `band` (low, high) replaces the run's own clip range.

    Raises UserError where records are missing, or where the run clips nothing and there is no band.
    """
    config, steps, buckets = recorded_config(run_dir), [], []
    for item in load_iterations(run_dir, iterations=iterations, band=band):
        steps.append(clip_step(item, config))
        buckets.append(clip_bucket(item))
    return ClipTables(pd.concat(steps, ignore_index=True), pd.concat(buckets, ignore_index=True))


def overview(tables: ClipTables) -> list[str]:
    """Return the printed lines: shares of clipped tokens, ratios, KL."""
    steps = tables.clip_step[(tables.clip_step["subset"] == "all") & (tables.clip_step["n_tok"] > 0)]

    def mean(name: str) -> float:
        return float(np.average(steps[name], weights=steps["n_tok"]))

    return [
        f"token visits {steps['n_tok'].sum():,} in {len(steps)} steps of {steps['iteration'].nunique()} iterations",
        f"outside the band {mean('band_out'):.3%} = clip_high {mean('clip_high'):.3%} + clip_low {mean('clip_low'):.3%}"
        f" + wrong_high {mean('wrong_high'):.3%} + wrong_low {mean('wrong_low'):.3%}"
        f" + no advantage {mean('out_without_advantage'):.3%}",
        f"gradient removed {mean('grad_zero'):.3%} of tokens; of a step {steps['grad_zero'].min():.1%} to "
        f"{steps['grad_zero'].max():.1%}; without any step taken (clip_floor) {mean('clip_floor'):.3%}",
        f"gradient removed: {np.nanmean(steps['gm_clip']):.1%} of the surrogate mass (mean of steps)",
        f"largest ratio {steps['r_max'].max():.3g}, smallest {steps['r_min'].min():.3g}; beyond twice the range "
        f"{mean('beyond_twice'):.3%}",
        f"KL(anchor || new) of a step, token mean: k1 {mean('kl_k1'):.2e}, k3 {mean('kl_k3'):.2e} nats",
    ]


@program
def main(argv: Sequence[str] | None) -> None:
    """Print the overview."""
    parser = Parser(prog="python -m ppo_repro.analysis.clipping", description="What did the clip do in a run?")
    parser.add_argument("run", type=run_named, help="folder of a run")
    parser.add_argument("--clip-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="in place of the run's own")
    arguments = parser.parse_args(argv)
    band = None if arguments.clip_range is None else (arguments.clip_range[0], arguments.clip_range[1])
    tell("\n".join(overview(clip_tables(arguments.run, band=band))))
