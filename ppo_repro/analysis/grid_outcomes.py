"""Compute the outcome of each cell of a grid: one number per measure, from the records of its run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis.clip_flags import clipped_at_start, is_outside, recorded_clipped
from ppo_repro.analysis.clip_rules import ClipRule, clip_rule
from ppo_repro.analysis.run_tables import RunTables, run_tables
from ppo_repro.base.errors import UserError
from ppo_repro.base.output import say
from ppo_repro.config.algorithm import FunctionObjective
from ppo_repro.records import reader
from ppo_repro.records.grid import CELLS, axes_of, read_grid_table
from ppo_repro.records.logprob_pairs import deltas
from ppo_repro.records.schema import ITERATIONS
from ppo_repro.statistics.kl import k3

LAST_FEW = FIRST_FEW = 5  # iterations
ACCURACY = "eval_accuracy"
MISMATCH_TOKEN_COLUMNS = ("old_logprobs", "rollout_logprobs", "advantages")


@dataclass(frozen=True)
class Measure:
    """A number of a run that compares settings: a column of `outcomes`.

    `name` is the name of the recorded column. A measure that no table has is a row of columns.md.
    """

    name: str
    form: str  # format of a value
    meaning: str
    averaged: slice | None = None  # rows of the table `iterations` whose mean it is; None for other measures
    may_be_missing: bool = False  # whether runs or iterations may lack it, as those without a value model or a clip


def _average(column: str, form: str, meaning: str, when: Literal["first", "last"]) -> Measure:
    """Return the measure that is the mean of a column of `iterations` over the first or last iterations of a run."""
    count, rows = (FIRST_FEW, slice(FIRST_FEW)) if when == "first" else (LAST_FEW, slice(-LAST_FEW, None))
    (recorded,) = ITERATIONS.named(column)
    return Measure(column, form, f"{meaning}, {when} {count} iterations", rows, may_be_missing=recorded.nullable)


MEASURES = {
    measure.name: measure
    for measure in (
        Measure(ACCURACY, "{:.3f}", "greedy accuracy on held-out prompts after training"),
        _average("score_mean", "{:.3f}", "mean score of the sampled responses", "last"),
        _average("ref_kl_per_sequence", "{:.2f}", "KL(policy || reference), exact, seq_mean_token_sum, nats", "last"),
        _average("entropy", "{:.2f}", "entropy of the policy, token mean, nats", "last"),
        _average("explained_variance", "{:.2f}", "explained variance of the value model", "first"),
        Measure("k3", "{:.1e}", "KL(rollout || old) by k3, token mean, nats, all iterations"),
        Measure("clip_floor", "{:.2%}",
            "share of response tokens whose gradient the clip would remove before any step, by mismatch alone",
            may_be_missing=True),
        Measure("clip_fraction", "{:.1%}",
            "share of token visits whose policy gradient the clip removed, as TRL, verl and OpenRLHF count",
            may_be_missing=True),
        Measure("outside_fraction", "{:.1%}",
            "share of token visits whose ratio was outside the band, as CleanRL counts", may_be_missing=True),
    )
}  # fmt: skip


class ClipShares(NamedTuple):
    """Recorded shares of token visits: the clip removed the gradient, and the ratio was outside the band."""

    clip_fraction: float
    outside_fraction: float


class CellMismatch(NamedTuple):
    """Mismatch of sampler and trainer: mean k3 in nats, and the share of tokens that the clip cuts before any step."""

    k3: float
    clip_floor: float


def _clip_rules(tables: RunTables) -> Iterator[tuple[int, ClipRule | None]]:
    """Yield each iteration with its `clip_rule`."""
    for iteration, clip_range in tables.read("iterations", ["iteration", "clip_range"]).itertuples(index=False):
        yield int(iteration), clip_rule(tables.config.ppo, float(clip_range))


def clip_shares_of_cell(tables: RunTables) -> ClipShares:
    """Return the clipped shares of a run, over the iterations that the run itself computed.

    The settings of a grid may have any objective, so the shares count recorded flags and ratios. The recorded ratio of
    `sequence_clip` is the ratio of the response. Both shares are 0 if the objective clips nothing, as `cispo`. Your own
    objective has no known band, so `outside_fraction` is NaN. Both are NaN if it does not say which tokens it cut.
    """
    count = removed = 0
    outside = math.nan if isinstance(tables.config.ppo.objective, FunctionObjective) else 0.0
    for iteration, rule in _clip_rules(tables):
        updates = tables.read("updates", ["clip_flag", "ratios"], iteration)
        visits = updates.dropna(subset="clip_flag")  # null where the policy took no step
        if (visits["clip_flag"] == "unknown").any():
            return ClipShares(math.nan, math.nan)
        count += len(visits)
        removed += int(recorded_clipped(visits["clip_flag"]).sum())
        if rule is not None:
            outside += float(is_outside(visits["ratios"].to_numpy(np.float32), rule).sum())
    return ClipShares(removed / count, outside / count)


def mismatch_of_cell(tables: RunTables) -> CellMismatch:
    """Return the mismatch of a run, over the response tokens of the iterations that the run itself computed.

    One iteration is in memory at a time. clip_floor is 0 with the anchor `old`, whose first ratio is 1, and NaN if the
    objective does not clip each token's ratio, or if a ratio is NaN. k3 is infinite or NaN if a log-prob is. The k3 of
    METRICS leaves such tokens out, because `n_nonfinite` counts them beside it; a row of a grid has no such count.
    """
    count, k3_sum, removed = 0, 0.0, 0.0
    for iteration, rule in _clip_rules(tables):
        tokens = tables.read("tokens", MISMATCH_TOKEN_COLUMNS, iteration)
        delta = deltas(tokens)
        count += len(tokens)
        k3_sum += float(k3(-delta).sum())
        if rule is None or rule.unit != "token" or (rule.anchor == "rollout" and np.isnan(delta).any()):
            removed = math.nan
        else:
            removed += float(clipped_at_start(tokens, rule).sum())
    return CellMismatch(k3_sum / count, removed / count)


def averaged_measures(rows: pd.DataFrame) -> dict[str, float]:
    """Return the MEASURES that are means over a run's table of iterations.

    An iteration may lack a measure with `may_be_missing`. Otherwise the mean is NaN if an iteration has no number.
    """
    return {
        measure.name: float(rows[measure.name].iloc[measure.averaged].mean(skipna=measure.may_be_missing))
        for measure in MEASURES.values()
        if measure.averaged is not None
    }


def measures_of(run_dir: Path) -> dict[str, float]:
    """Return MEASURES of a run except `eval_accuracy`, which is in the grid's table."""
    tables = run_tables(run_dir)
    return {
        **averaged_measures(reader.read_iterations(run_dir, recorded=tables.recorded)),
        **mismatch_of_cell(tables)._asdict(),
        **clip_shares_of_cell(tables)._asdict(),
    }


def incomplete_cells(cells: pd.DataFrame) -> list[str]:
    """Return name and state of each cell of a grid's table that is not complete, such as one that failed."""
    incomplete = cells[cells["state"] != "complete"].to_dict("records")
    return [f"{row['cell']} ({row['state']})" for row in incomplete]


def complete_cells(grid: Path, needed: Sequence[str] = ()) -> pd.DataFrame:
    """Return the complete cells of a grid's table, with a column `point` that joins the labels of all axes.

    Raises UserError if the grid has no table, no complete cell, or not all of the `needed` columns.
    """
    path = grid / CELLS
    table = read_grid_table(path)
    if missing := [name for name in ("state", "run_dir", "seed", "fingerprint", *needed) if name not in table]:
        raise UserError(f"{path}: has no column {', '.join(missing)}; give a grid of runs on language models")
    cells = table[table["state"] == "complete"].reset_index(drop=True)
    if cells.empty:
        raise UserError(f"{grid}: has no complete cell; run `ppo-repro grid` on its file first")
    if left_out := incomplete_cells(table):
        say(f"warning: {grid}: without {'; '.join(left_out)}")
    points = [", ".join(map(str, labels)) for labels in cells[axes_of(cells)].itertuples(index=False)]
    cells.insert(0, "point", pd.Series(points, index=cells.index, dtype=object))
    return cells


def outcomes(grid: Path) -> pd.DataFrame:
    """Return one row per complete cell: point, labels (`axis.NAME`), seed, fingerprint and MEASURES.

    Raises UserError if the grid has no table or no complete cell.
    """
    accuracy = f"final.{ACCURACY}"
    cells = complete_cells(grid, (accuracy,))
    measures = pd.DataFrame([measures_of(grid / str(run_dir)) for run_dir in cells["run_dir"]])
    measures.insert(0, ACCURACY, cells[accuracy])
    return pd.concat([cells[["point", *axes_of(cells), "seed", "fingerprint"]], measures], axis=1)
