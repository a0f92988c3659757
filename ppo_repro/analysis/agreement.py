"""Count the bits in which sampler and trainer differ, from the records; a run counts by the same function."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

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
        sums: dict[str, Any] = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        largest = float(np.maximum(self.max_abs_old_rollout, other.max_abs_old_rollout))  # NaN stays NaN
        return Agreement(**sums | {"max_abs_old_rollout": largest})


def _float32(frame: pd.DataFrame, column: str) -> Float32:
    return np.ascontiguousarray(frame[column].to_numpy(), dtype=np.float32)


def run_agreement(run_dir: Path | str) -> Agreement:
    """Count the unequal bits in the iterations that a complete run computed, one iteration in memory at a time.

    Raises UserError on missing or damaged records.
    """
    recorded = reader.open_manifest(run_dir)

    def of_one(iteration: int) -> Agreement:
        tokens = reader.read_tokens(run_dir, iterations=[iteration], columns=TOKENS_COMPARED, recorded=recorded)
        updates = reader.read_updates(run_dir, iterations=[iteration], columns=UPDATES_COMPARED, recorded=recorded)
        return agreement_of(tokens, updates)

    return reduce(add, map(of_one, recorded.own_iterations))


def agreement_of(tokens: pd.DataFrame, updates: pd.DataFrame) -> Agreement:
    """Count the unequal bits of one iteration, from TOKENS_COMPARED and UPDATES_COMPARED of its tables."""
    joined = updates.merge(tokens, on=TOKEN_KEY, how="left", validate="many_to_one")
    rollout, old = (_float32(tokens, name) for name in ("rollout_logprobs", "old_logprobs"))
    is_first = (joined["epoch"] == 0) & (joined["minibatch"] == 0)
    ratios, values, again = _of_steps(joined)
    return Agreement(
        **iteration_agreement(rollout, old, *_of_steps(joined[is_first]))._asdict(),
        tokens=len(tokens),
        first_minibatch_tokens=int(is_first.sum()),
        update_rows=len(joined),
        unequal_ratios=int(unequal_bits(ratios, np.ones_like(ratios)).sum()),
        unequal_update_values=int(unequal_bits(again, values).sum()),
    )


def _of_steps(rows: pd.DataFrame) -> tuple[Float32, Float32, Float32]:
    """Return the ratios of the policy's steps, and values and new values of the value model's steps."""
    # a ratio may be a recorded NaN, so only clip_flag says that the policy took a step; value steps have no flag
    of_policy, of_value = rows[rows["clip_flag"].notna()], rows[rows["new_values"].notna()]
    return _float32(of_policy, "ratios"), _float32(of_value, "values"), _float32(of_value, "new_values")
