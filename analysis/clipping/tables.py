"""What did the clip do in a run? All tables, with one iteration in memory at a time.

`python -m analysis.clipping RUN` prints an overview; `--out DIR` writes every table as Parquet.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.clipping.bucket import clip_bucket, clip_vocab, merged_vocab
from analysis.clipping.dynamics import band_transitions, early_stop, overshoot_survival, update_quality
from analysis.clipping.flags import recorded_against_float64
from analysis.clipping.step import clip_step
from analysis.clipping.update_rows import load_iterations, recorded_config
from analysis.program import program, unwritable
from ppo_repro.errors import UserError
from ppo_repro.output import Parser, tell
from ppo_repro.records import reader


@dataclass(frozen=True)
class ClipTables:
    """Every table of the clip analysis; the first column is run_id, the start of the run's fingerprint."""

    clip_step: pd.DataFrame  # iteration, step, subset
    clip_bucket: pd.DataFrame  # iteration, kind, adv_sign, bin
    overshoot_survival: pd.DataFrame  # iteration, epoch, threshold
    clip_vocab: pd.DataFrame  # token id, over the iterations read
    band_transitions: pd.DataFrame  # iteration, epoch
    update_quality: pd.DataFrame  # iteration
    flag_differences: pd.DataFrame  # iteration; empty for a clip range other than the run's own


def clip_tables(
    run_dir: Path | str, *, iterations: Sequence[int] | None = None, band: tuple[float, float] | None = None
) -> ClipTables:
    """All tables of a run; `band` (low, high) replaces the run's own clip range.

    Raises UserError where records are missing, or where the run clips nothing and there is no band.
    """
    config, parts, scores = recorded_config(run_dir), defaultdict(list), []
    for item in load_iterations(run_dir, iterations=iterations, band=band):
        parts["clip_step"].append(clip_step(item, config))
        for table_of in (clip_bucket, overshoot_survival, clip_vocab, band_transitions):
            parts[table_of.__name__].append(table_of(item))
        parts["flag_differences"].append(recorded_against_float64(item) if item.rule.is_recorded else pd.DataFrame())
        scores.append((item.iteration, item.sequences["scores"]))
    tables = {name: pd.concat(some, ignore_index=True) for name, some in parts.items()}
    tables["clip_vocab"] = merged_vocab(parts["clip_vocab"])
    tables["update_quality"] = update_quality(scores)
    run_id = reader.open_manifest(run_dir).fingerprint[:12]
    for table in tables.values():
        table.insert(0, "run_id", run_id)
    return ClipTables(**tables)


def overview(tables: ClipTables, early_stop_kl: float | None) -> list[str]:
    """The run in a few lines."""
    steps = tables.clip_step[(tables.clip_step["subset"] == "all") & (tables.clip_step["n_tok"] > 0)]

    def mean(name: str) -> float:
        return float(np.average(steps[name], weights=steps["n_tok"]))

    fell = tables.update_quality["score_gain"].dropna() < 0
    lines = [
        f"token visits {steps['n_tok'].sum():,} in {len(steps)} steps of {steps['iteration'].nunique()} iterations",
        f"outside the band {mean('band_out'):.3%} = clip_high {mean('clip_high'):.3%} + clip_low {mean('clip_low'):.3%}"
        f" + wrong_high {mean('wrong_high'):.3%} + wrong_low {mean('wrong_low'):.3%}"
        f" + no advantage {mean('out_without_advantage'):.3%}",
        f"gradient removed {mean('grad_zero'):.3%} of tokens; of a step {steps['grad_zero'].min():.1%} to "
        f"{steps['grad_zero'].max():.1%}; without any step taken (clip_floor) {mean('clip_floor'):.3%}",
        f"gradient removed: {np.nanmean(steps['gm_clip']):.1%} of the surrogate mass (mean of steps)",
        f"largest ratio {steps['r_max'].max():.3g}, smallest {steps['r_min'].min():.3g}; beyond twice the range "
        f"{mean('overshoot_beyond_range'):.3%}",
        f"back in the band at the next visit {tables.band_transitions['return_rate'].mean():.1%}, still clipped "
        f"{tables.band_transitions['still_clipped_rate'].mean():.1%} (mean)",
        f"KL(anchor || new) of a step, token mean: k1 {mean('kl_k1'):.2e}, k3 {mean('kl_k3'):.2e} nats",
        f"mean score of the next iteration lower in {fell.sum()} of {len(fell)}",
    ]
    if len(tables.flag_differences):
        difference = tables.flag_differences.drop(columns=["run_id", "iteration"]).sum()
        lines.append(
            f"recorded flags that float64 decides otherwise {difference['differ']} of {difference['n_tok']:,} "
            f"({difference['bound_rounding']} by the bound's rounding, {difference['ratio_rounding']} by the ratio's; "
            f"{difference['unexplained']} unexplained)"
        )
    if early_stop_kl is not None:
        for estimate, group in early_stop(tables.clip_step, early_stop_kl).groupby("estimate", sort=False):
            lines.append(
                f"early stop at {early_stop_kl:g} by {estimate}: {group['stopped'].sum()} of {len(group)} iterations, "
                f"after {group['steps_taken'].mean():.1f} of {group['steps'].mean():.1f} steps"
            )
    return lines


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m analysis.clipping", description="What did the clip do in a run?")
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--clip-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="in place of the run's own")
    parser.add_argument("--early-stop-kl", type=float, help="where this target would have stopped, nats per token")
    parser.add_argument("--out", type=Path, help="write every table as Parquet into this folder")
    return parser.parse_args(argv)


@program
def main(argv: Sequence[str] | None) -> None:
    """Print the overview; exit code 2 and one line on a user error."""
    arguments = _arguments(argv)
    if arguments.out is not None and arguments.out.exists() and not arguments.out.is_dir():
        raise UserError(f"--out {arguments.out}: must be a folder, new or not; it is a file, choose another name")
    band = None if arguments.clip_range is None else (arguments.clip_range[0], arguments.clip_range[1])
    tables = clip_tables(arguments.run, band=band)
    lines = overview(tables, arguments.early_stop_kl)
    if arguments.out is not None:
        _write(tables, arguments.out)
    tell("\n".join(lines))


def _write(tables: ClipTables, out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for field in fields(tables):
            getattr(tables, field.name).to_parquet(out / f"{field.name}.parquet", index=False)
    except OSError as error:
        raise unwritable(out, error) from error
