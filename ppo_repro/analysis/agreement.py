"""Count the bits in which sampler and trainer differ, from the records; a run counts by the same function."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.run_tables import RunTables
from ppo_repro.records import reader
from ppo_repro.records.logprob_pairs import TOKEN_KEY
from ppo_repro.statistics.bits import Float32, iteration_agreement, unequal_bits

TOKENS_COMPARED = [*TOKEN_KEY, "rollout_logprobs", "old_logprobs", "values"]
UPDATES_COMPARED = [*TOKEN_KEY, "epoch", "minibatch", "ratios", "clip_flag", "new_values"]


@dataclass(frozen=True)
class Agreement:
    """Counts over one or more iterations; `+` adds the counts of other iterations.

    Log-probs are in nats. `unequal` means different in any bit.
    """

    tokens: int
    unequal_old_rollout_logprobs: int
    max_abs_old_rollout: float
    first_minibatch_tokens: int
    unequal_first_ratios: int
    unequal_values: int
    update_rows: int
    unequal_ratios: int  # over all epochs and minibatches; 0 only if the weights never moved
    unequal_update_values: int

    def __add__(self, other: Agreement) -> Agreement:
        largest = float(np.maximum(self.max_abs_old_rollout, other.max_abs_old_rollout))  # NaN stays NaN
        return Agreement(
            tokens=self.tokens + other.tokens,
            unequal_old_rollout_logprobs=self.unequal_old_rollout_logprobs + other.unequal_old_rollout_logprobs,
            max_abs_old_rollout=largest,
            first_minibatch_tokens=self.first_minibatch_tokens + other.first_minibatch_tokens,
            unequal_first_ratios=self.unequal_first_ratios + other.unequal_first_ratios,
            unequal_values=self.unequal_values + other.unequal_values,
            update_rows=self.update_rows + other.update_rows,
            unequal_ratios=self.unequal_ratios + other.unequal_ratios,
            unequal_update_values=self.unequal_update_values + other.unequal_update_values,
        )


def _float32(frame: pd.DataFrame, column: str) -> Float32:
    return np.ascontiguousarray(frame[column].to_numpy(), dtype=np.float32)


def run_agreement(run_dir: Path | str) -> Agreement:
    """Count the unequal bits in the iterations that a complete run computed, one iteration in memory at a time.

    Raises UserError on missing or damaged records.
    """
    recorded = reader.open_manifest(run_dir)
    tables = RunTables(run_dir, recorded, recorded.own_iterations)  # of any kind with tokens, not only of language

    def count(iteration: int) -> Agreement:
        tokens = tables.read("tokens", TOKENS_COMPARED, iteration)
        return agreement_of(tokens, tables.read("updates", UPDATES_COMPARED, iteration))

    return reduce(add, map(count, tables.iterations))


def agreement_of(tokens: pd.DataFrame, updates: pd.DataFrame) -> Agreement:
    """Count the unequal bits of one iteration, from TOKENS_COMPARED and UPDATES_COMPARED of its tables."""
    joined = updates.merge(tokens, on=TOKEN_KEY, how="left", validate="many_to_one")
    # a ratio may be a recorded NaN, so only clip_flag says that the policy took a step; value steps have no flag
    policy, value = joined[joined["clip_flag"].notna()], joined[joined["new_values"].notna()]
    first_values = _first_minibatch(value)
    counts = iteration_agreement(
        rollout=_float32(tokens, "rollout_logprobs"),
        old=_float32(tokens, "old_logprobs"),
        first_ratios=_float32(_first_minibatch(policy), "ratios"),
        values=_float32(first_values, "values"),
        new_values=_float32(first_values, "new_values"),
    )
    return Agreement(
        **counts._asdict(),
        tokens=len(tokens),
        first_minibatch_tokens=len(_first_minibatch(joined)),
        update_rows=len(joined),
        unequal_ratios=int(unequal_bits(_float32(policy, "ratios"), np.ones(len(policy))).sum()),
        unequal_update_values=int(unequal_bits(_float32(value, "new_values"), _float32(value, "values")).sum()),
    )


def _first_minibatch(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["epoch"] == 0) & (rows["minibatch"] == 0)]
