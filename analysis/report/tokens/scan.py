"""One pass over the iterations of a language run: the counts and rows that its page shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.report.figures import counts, curves
from analysis.report.reading.facts import RunFacts, clip_bounds
from analysis.report.reading.load import IterationRecords, iterations_of
from analysis.report.tokens.responses import response_summary


@dataclass(frozen=True)
class Scan:
    """The counts and rows of one pass over a run's iterations; see `figures.counts` and `tokens.responses`."""

    curves: pd.DataFrame
    probabilities: counts.Counts
    deltas: counts.Counts
    nonfinite_deltas: int
    ratios: pd.DataFrame
    quadrants: counts.Counts
    overshoot: pd.DataFrame
    flags: pd.DataFrame
    extremes: pd.DataFrame
    text: pd.DataFrame
    responses: pd.DataFrame
    scores: dict[int, counts.Floats]  # by iteration
    prompts: pd.DataFrame  # iteration, sequence, prompt_key


def scan_run(facts: RunFacts, iterations: pd.DataFrame, steps: pd.DataFrame) -> Scan:
    """One pass over the iterations, with one in memory at a time."""
    bounds = clip_bounds(facts.config, iterations)
    rows: dict[str, list] = {name: [] for name in ("curves", "flags", "extremes", "text")}
    frames: dict[str, list[pd.DataFrame]] = {name: [] for name in ("ratios", "overshoot", "responses")}
    scores: dict[int, counts.Floats] = {}
    keys: list[pd.DataFrame] = []
    probabilities, deltas, quadrants, nonfinite = _zero_2d(), _zero_deltas(), _zero_quadrants(), 0
    for records in iterations_of(facts.run_dir, facts.iterations):
        delta = counts.deltas(records.tokens)
        nonfinite += int(np.count_nonzero(~np.isfinite(delta)))
        probabilities = probabilities + counts.probability_grid(records.tokens)
        deltas = deltas + counts.histogram(delta, counts.DELTA_EDGES)
        quadrants = quadrants + counts.quadrant_grid(_advantages(records), records.updates)
        rows["curves"] += curves.sampled_rows(records.iteration, records.sequences, records.tokens)
        rows["flags"].append(counts.flag_row(records.iteration, records.updates))
        rows["extremes"].append(counts.extremes_row(records.iteration, records.updates))
        rows["text"].append(counts.text_row(records.iteration, records.sequences, records.tokens))
        frames["ratios"].append(counts.ratio_histogram(records.updates))
        frames["responses"].append(response_summary(records))
        if bounds is not None:
            frames["overshoot"].append(counts.overshoot_counts(records.updates, bounds.low, bounds.high))
        scores[records.iteration] = records.sequences["scores"].to_numpy(np.float64)
        keys.append(records.sequences[["iteration", "sequence", "prompt_key"]])
    recorded = curves.recorded_rows(iterations, steps, facts.manifest.final)
    return Scan(
        curves=pd.concat([pd.DataFrame(rows["curves"]), recorded], ignore_index=True),
        probabilities=probabilities,
        deltas=deltas,
        nonfinite_deltas=nonfinite,
        ratios=_added(frames["ratios"], ["epoch", "minibatch", "bin_lo", "bin_hi"]),
        quadrants=quadrants,
        overshoot=_added(frames["overshoot"], ["epoch", "beyond"]),
        flags=pd.DataFrame(rows["flags"]),
        extremes=pd.DataFrame(rows["extremes"]),
        text=pd.DataFrame(rows["text"]),
        responses=pd.concat(frames["responses"], ignore_index=True),
        scores=scores,
        prompts=pd.concat(keys, ignore_index=True),
    )


def _advantages(records: IterationRecords) -> counts.Floats:
    return records.tokens["advantages"].to_numpy(np.float64)[records.token_rows]


def _added(frames: list[pd.DataFrame], keys: list[str]) -> pd.DataFrame:
    """The counts of all iterations, added by key."""
    if not frames:
        return pd.DataFrame(columns=[*keys, "count", "total"])
    return pd.concat(frames, ignore_index=True).groupby(keys, as_index=False, sort=True).sum()


def _zero_2d() -> counts.Counts:
    bins = len(counts.PROBABILITY_EDGES) - 1
    return np.zeros((bins, bins), dtype=np.int64)


def _zero_quadrants() -> counts.Counts:
    return np.zeros((len(counts.ADVANTAGE_EDGES) - 1, len(counts.RATIO_EDGES) - 1), dtype=np.int64)


def _zero_deltas() -> counts.Counts:
    return np.zeros(len(counts.DELTA_EDGES) - 1, dtype=np.int64)
