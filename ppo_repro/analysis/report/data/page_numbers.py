"""Read a run once, with one iteration in memory at a time, and return the counts and rows for its page.

All numbers are float64 from the recorded columns. Separate counts have the values that are not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis import agreement
from ppo_repro.analysis.agreement import Agreement, agreement_of
from ppo_repro.analysis.clip_flags import DRAWN, recorded_clipped
from ppo_repro.analysis.report.data.run_curves import (
    Curves,
    curves_of,
    read_sampled,
    response_means,
    return_means,
    returns_of,
)
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.records import reader
from ppo_repro.records.logprob_pairs import deltas
from ppo_repro.records.manifest import has_responses
from ppo_repro.runs.summary import draws_of_records
from ppo_repro.statistics.clusters import Floats, Ratio
from ppo_repro.statistics.draws import NONE, Draws

DELTA_EDGES: Floats = 10.0 ** np.linspace(-9.0, 1.0, 31)  # of |old - rollout|, nats
QUANTILES = {"smallest": 0.0, "low": 0.01, "median": 0.5, "high": 0.99, "largest": 1.0}


@dataclass(frozen=True)
class Counts:
    """Counts over one or more iterations; `+` adds the counts of other iterations."""

    deltas: npt.NDArray[np.int64]  # of `delta_counts`
    nonfinite_deltas: int
    nonfinite_ratios: int
    draws: Draws
    agreement: Agreement

    def __add__(self, other: Counts) -> Counts:
        sums: dict[str, Any] = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Counts(**sums)


class StepRatios(NamedTuple):
    """The smallest and largest finite ratio of an optimizer step, and QUANTILES between them."""

    iteration: int
    epoch: int
    minibatch: int
    smallest: float
    low: float
    median: float
    high: float
    largest: float


class ResponseSummary(NamedTuple):
    """What decides whether a page shows a response token by token; `RESPONSES` of `view` computes the same in SQL."""

    iteration: int
    sequence: int
    tokens: int
    score: float
    mismatch: float  # max |old - rollout log-prob| in nats; infinite if one is NaN, so a reader finds the response
    clipped: int  # token updates


@dataclass(frozen=True)
class _Iteration:
    """Numbers of one iteration; `responses` is empty for a control run."""

    means: Mapping[str, Ratio]  # of its samples, by metric
    values: Floats  # scores, or returns of the episodes that ended
    counts: Counts
    ratios: pd.DataFrame  # a row per StepRatios
    flags: dict[str, int]  # iteration, token_updates and DRAWN: counts
    responses: pd.DataFrame  # a row per ResponseSummary


@dataclass(frozen=True)
class PageNumbers:
    """Numbers for a run's page; `responses` is empty for a control run.

    Curves, values and responses are of all iterations. The other numbers leave out iterations that a fork copied.
    """

    curves: Curves
    values: dict[int, Floats]  # by iteration
    responses: pd.DataFrame  # a row per ResponseSummary
    counts: Counts
    ratios: pd.DataFrame  # a row per StepRatios
    flags: pd.DataFrame  # by iteration: iteration, token_updates and DRAWN


def delta_counts(delta: Floats) -> npt.NDArray[np.int64]:
    """Count tokens with a finite delta by |delta| in bins of DELTA_EDGES: int64 [2, bins] for delta > 0 and delta < 0.

    Outer bins are open.
    """
    finite = delta[np.isfinite(delta)]
    inside = np.clip(np.abs(finite), DELTA_EDGES[0], DELTA_EDGES[-1])
    return np.array([np.histogram(inside[where], DELTA_EDGES)[0] for where in (finite > 0, finite < 0)])


def ratio_quantiles(iteration: int, updates: pd.DataFrame) -> pd.DataFrame:
    """Return a row per StepRatios for the steps of an iteration that have a finite ratio."""
    finite = updates[np.isfinite(updates["ratios"].to_numpy(np.float64))].astype({"ratios": "float64"})
    table = finite.groupby(["epoch", "minibatch"])["ratios"].quantile(list(QUANTILES.values())).unstack()
    named = table.reindex(columns=list(QUANTILES.values())).set_axis(list(QUANTILES), axis="columns")
    return named.reset_index().assign(iteration=iteration)[[*StepRatios._fields]]


def read_page_numbers(facts: Facts, iterations: pd.DataFrame, steps: pd.DataFrame) -> PageNumbers:
    """Read all iterations of a run of PPO once, and return the numbers for its page."""
    scans = {number: _scan_iteration(facts, number) for number in facts.iterations}
    computed = [scans[number] for number in facts.manifest.own_iterations]
    return PageNumbers(
        curves=curves_of(facts, {number: scan.means for number, scan in scans.items()}, iterations, steps),
        values={number: scan.values for number, scan in scans.items()},
        responses=pd.concat([scan.responses for scan in scans.values()], ignore_index=True),
        counts=reduce(add, (scan.counts for scan in computed)),
        ratios=pd.concat([scan.ratios for scan in computed], ignore_index=True),
        flags=pd.DataFrame([scan.flags for scan in computed]),
    )


def _scan_iteration(facts: Facts, number: int) -> _Iteration:
    run_dir, one, recorded = facts.run_dir, [number], facts.manifest
    updates = reader.read_updates(run_dir, iterations=one, columns=agreement.UPDATES_COMPARED, recorded=recorded)
    if has_responses(recorded):
        sequences, tokens = read_sampled(facts, number)
        draws, values = draws_of_records(number, tokens), sequences["scores"].to_numpy(np.float64)
        means = response_means(sequences, tokens, draws)
        responses = _response_summary(number, sequences, tokens, updates)
    else:
        tokens = reader.read_tokens(run_dir, iterations=one, columns=agreement.TOKENS_COMPARED, recorded=recorded)
        draws, values, responses = NONE, returns_of(facts, number), pd.DataFrame(columns=ResponseSummary._fields)
        means = return_means(values)
    ratios, flags = ratio_quantiles(number, updates), _flag_counts(number, updates["clip_flag"])
    return _Iteration(means, values, _counts(tokens, updates, draws), ratios, flags, responses)


def _counts(tokens: pd.DataFrame, updates: pd.DataFrame, draws: Draws) -> Counts:
    """Count one iteration."""
    delta = deltas(tokens)
    # null reads as NaN; only the flag says whether there was a step
    nonfinite_ratios = ~np.isfinite(updates["ratios"].to_numpy(np.float64)) & updates["clip_flag"].notna().to_numpy()
    return Counts(
        deltas=delta_counts(delta),
        nonfinite_deltas=int(np.count_nonzero(~np.isfinite(delta))),
        nonfinite_ratios=int(nonfinite_ratios.sum()),
        draws=draws,
        agreement=agreement_of(tokens, updates),
    )


def _flag_counts(iteration: int, flag: pd.Series) -> dict[str, int]:
    counts = flag.value_counts()
    named = {name: int(counts.get(name, 0)) for name in DRAWN}
    return {"iteration": iteration, "token_updates": int(counts.sum()), **named}


def _response_summary(
    iteration: int, sequences: pd.DataFrame, tokens: pd.DataFrame, updates: pd.DataFrame
) -> pd.DataFrame:
    """Return a row per ResponseSummary."""
    delta, largest = np.abs(deltas(tokens)), np.zeros(len(sequences))
    np.maximum.at(largest, tokens["sequence"].to_numpy(np.int64), np.where(np.isnan(delta), np.inf, delta))
    clipped = recorded_clipped(updates["clip_flag"])
    by_response = np.bincount(updates["sequence"].to_numpy(np.int64)[clipped], minlength=len(sequences))
    named = sequences.rename(columns={"response_length": "tokens", "scores": "score"})
    return named.assign(iteration=iteration, mismatch=largest, clipped=by_response)[[*ResponseSummary._fields]]
