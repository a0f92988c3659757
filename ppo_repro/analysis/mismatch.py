"""Do two log-probs of the same token agree? Tables for a run or for dumps of other stacks.

One iteration is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pandas as pd

from ppo_repro.analysis.mismatch_buckets import bucket_sums, bucket_table
from ppo_repro.analysis.mismatch_metrics import METRICS, Sums, merged, sums_of, update_table
from ppo_repro.analysis.pairs import NO_TOKEN, iteration_of, masked_tokens
from ppo_repro.base.errors import UserError
from ppo_repro.testing.pairs import with_mismatch


@dataclass(frozen=True)
class Measured:
    """Sums of one iteration; `merged` and `update_table` take `mismatch`, `bucket_table` takes `buckets`."""

    iteration: int
    mismatch: Sums
    buckets: pd.DataFrame


@dataclass(frozen=True)
class Tables:
    """Tables of `update_table` and `bucket_table` over all iterations; the first column is the iteration."""

    update: pd.DataFrame
    bucket: pd.DataFrame


def measure(pairs: Iterable[pd.DataFrame]) -> Iterator[Measured]:
    """Yield the sums of each chunk of pairs (`run_pairs`). Raises UserError if a chunk cannot be read."""
    for chunk in pairs:
        tokens = with_mismatch(chunk)
        yield Measured(iteration_of(chunk), sums_of(tokens, masked_tokens(chunk)), bucket_sums(tokens))


def tables(measured: Iterable[Measured]) -> Tables:
    """Return the tables of all iterations. Raises UserError if there is no token."""
    parts = list(measured)
    if not parts:
        raise UserError(NO_TOKEN)
    update = pd.concat([update_table(sums.mismatch).assign(iteration=sums.iteration) for sums in parts])
    bucket = pd.concat([bucket_table([sums.buckets]).assign(iteration=sums.iteration) for sums in parts])
    return Tables(*(table.set_index("iteration").reset_index() for table in (update, bucket)))


def summary_of(pairs: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Return METRICS of pairs beside their ideal values.

    Columns: metric, reduction, value, se (clustered by response, NaN if undefined), ideal, meaning. KL and differences
    of log-probs are in nats. Raises UserError if there is no token.
    """
    table = update_table(merged([sums_of(with_mismatch(chunk), masked_tokens(chunk)) for chunk in pairs]))
    ideal = pd.Series([metric.ideal for metric in METRICS], dtype="float64")
    explained = table.assign(ideal=ideal, meaning=[metric.meaning for metric in METRICS])
    return explained[["metric", "reduction", "value", "se", "ideal", "meaning"]]
