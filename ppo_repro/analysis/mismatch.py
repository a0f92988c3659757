"""Do two log-probs of the same token agree? Tables for a run or for dumps of other stacks.

One iteration is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pandas as pd

from ppo_repro.analysis.mismatch_buckets import Buckets, bucket_sums
from ppo_repro.base.errors import UserError
from ppo_repro.records.logprob_pairs import NO_TOKEN, iteration_of, masked_tokens
from ppo_repro.statistics.mismatch_metrics import (
    METRICS,
    MismatchSums,
    merged_sums,
    metric_table,
    mismatch_sums,
    with_mismatch,
)


@dataclass(frozen=True)
class IterationMismatch:
    """Sums of one iteration: `merged_sums` and `metric_table` take `sums`, `bucket_table` takes `buckets`."""

    iteration: int
    sums: MismatchSums
    buckets: Buckets


def mismatch_by_iteration(pairs: Iterable[pd.DataFrame]) -> Iterator[IterationMismatch]:
    """Yield the sums of each chunk of pairs (`run_pairs`). Raises UserError if a chunk cannot be read."""
    for chunk in pairs:
        tokens = with_mismatch(chunk)
        yield IterationMismatch(iteration_of(chunk), mismatch_sums(tokens, masked_tokens(chunk)), bucket_sums(tokens))


def mismatch_table(iterations: Iterable[IterationMismatch]) -> pd.DataFrame:
    """Return `metric_table` of each iteration, below each other; the first column is the iteration.

    Raises UserError if there is no token.
    """
    measured = list(iterations)
    if not any(len(part.sums.sequences) for part in measured):  # a mask may have removed all
        raise UserError(NO_TOKEN)
    tables = [metric_table(part.sums).assign(iteration=part.iteration) for part in measured]
    return pd.concat(tables).set_index("iteration").reset_index()


def mismatch_summary(pairs: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Return METRICS of pairs beside their ideal values.

    Columns: metric, reduction, value, se (clustered by response, NaN if undefined), ideal, meaning. KL and differences
    of log-probs are in nats. Raises UserError if there is no token.
    """
    parts = [mismatch_sums(with_mismatch(chunk), masked_tokens(chunk)) for chunk in pairs]
    if not any(len(part.sequences) for part in parts):
        raise UserError(NO_TOKEN)
    ideal = pd.Series([metric.ideal for metric in METRICS], dtype="float64")
    explained = metric_table(merged_sums(parts)).assign(ideal=ideal, meaning=[metric.meaning for metric in METRICS])
    return explained[["metric", "reduction", "value", "se", "ideal", "meaning"]]
