"""Read the numbers for the page of a run of PPO, with one iteration in memory at a time.

`read_mismatch` reads a run whose log-probs differ once more, because only such a run needs the other columns. All
numbers are float64 from the recorded columns. Separate counts have the values that are not finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.clip_flags import DRAWN, recorded_clipped
from ppo_repro.analysis.mismatch import IterationMismatch, mismatch_by_iteration, mismatch_table
from ppo_repro.analysis.mismatch_buckets import bucket_table
from ppo_repro.analysis.report.data.run_curves import (
    Curves,
    Means,
    curves_of,
    read_sampled,
    response_means,
    return_means,
    returns_of,
)
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.records.logprob_pairs import deltas, run_evidence
from ppo_repro.records.manifest import has_responses
from ppo_repro.runs.results import draws_of_records
from ppo_repro.statistics.clusters import Floats
from ppo_repro.statistics.draws import NONE, Draws
from ppo_repro.statistics.mismatch_metrics import with_mismatch
from ppo_repro.testing.diagnosis import Diagnosis, diagnose_sums
from ppo_repro.testing.evidence import PatternSums, pattern_sums

DELTA_EDGES: Floats = 10.0 ** np.linspace(-9.0, 1.0, 31)  # of |old - rollout|, nats
QUANTILES = {"smallest": 0.0, "low": 0.01, "median": 0.5, "high": 0.99, "largest": 1.0}
_UPDATE_COLUMNS = ["sequence", "epoch", "minibatch", "ratios", "clip_flag"]


class Counts(NamedTuple):
    """Counts over one or more iterations."""

    deltas: npt.NDArray[np.int64]  # of `delta_counts`
    zero_deltas: int
    nonfinite_deltas: int
    nonfinite_ratios: int
    draws: Draws


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


def read_page_numbers(facts: Facts) -> PageNumbers:
    """Read all iterations of a run of PPO once, and return the numbers for its page."""
    recorded, tables = facts.manifest, facts.tables
    means: dict[int, Means] = {}
    values: dict[int, Floats] = {}
    responses = [pd.DataFrame(columns=ResponseSummary._fields)]
    counts: list[Counts] = []
    ratios: list[pd.DataFrame] = []
    flags: list[dict[str, int]] = []
    for number in tables.iterations:
        updates = tables.read("updates", _UPDATE_COLUMNS, number)
        if has_responses(recorded):
            sequences, tokens = read_sampled(facts, number)
            draws = draws_of_records(number, tokens)
            values[number] = sequences["scores"].to_numpy(np.float64)
            means[number] = response_means(sequences, tokens, draws)
            responses.append(_response_summary(number, sequences, tokens, updates))
        else:
            tokens = tables.read("tokens", ["rollout_logprobs", "old_logprobs"], number)
            draws = NONE
            values[number] = returns_of(facts, number)
            means[number] = return_means(values[number])
        if number in recorded.own_iterations:
            counts.append(_counts(tokens, updates, draws))
            ratios.append(ratio_quantiles(number, updates))
            flags.append(_flag_counts(number, updates["clip_flag"]))
    return PageNumbers(
        curves=curves_of(facts, means),
        values=values,
        responses=pd.concat(responses[1:] or responses, ignore_index=True),
        counts=Counts(*(reduce(add, field) for field in zip(*counts, strict=True))),
        ratios=pd.concat(ratios, ignore_index=True),
        flags=pd.DataFrame(flags),
    )


def _counts(tokens: pd.DataFrame, updates: pd.DataFrame, draws: Draws) -> Counts:
    """Count one iteration."""
    delta = deltas(tokens)
    # null reads as NaN; only the flag says whether there was a step
    nonfinite_ratios = ~np.isfinite(updates["ratios"].to_numpy(np.float64)) & updates["clip_flag"].notna().to_numpy()
    return Counts(
        deltas=delta_counts(delta),
        zero_deltas=int(np.count_nonzero(delta == 0)),
        nonfinite_deltas=int(np.count_nonzero(~np.isfinite(delta))),
        nonfinite_ratios=int(nonfinite_ratios.sum()),
        draws=draws,
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


@dataclass(frozen=True)
class RunMismatch:
    """The mismatch of a run: its cause, by bucket and by iteration."""

    cause: Diagnosis
    buckets: pd.DataFrame  # a row per BucketRow
    metrics: pd.DataFrame  # of `mismatch_table`


def read_mismatch(facts: Facts) -> RunMismatch | None:
    """Read the mismatch of a run; None if no token has two finite log-probs."""
    measured, patterns = list[IterationMismatch](), list[PatternSums]()
    for pairs in run_evidence(facts.run_dir, facts.manifest):
        measured += mismatch_by_iteration([pairs])
        patterns.append(pattern_sums(with_mismatch(pairs)))
    if not any(pattern.tokens for pattern in patterns):
        return None
    cause = diagnose_sums([part.sums for part in measured], patterns)
    return RunMismatch(cause, bucket_table([part.buckets for part in measured]), mismatch_table(measured))
