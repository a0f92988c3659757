"""Count the bits in which sampler and trainer differ, from the records; a run counts by the same function."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

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
    tables = RunTables(run_dir, recorded, recorded.own_iterations)  # of any kind with tokens, not only of language

    def count(iteration: int) -> Agreement:
        tokens = tables.read("tokens", TOKENS_COMPARED, iteration)
        return agreement_of(tokens, tables.read("updates", UPDATES_COMPARED, iteration))

    return reduce(add, map(count, tables.iterations))


def agreement_of(tokens: pd.DataFrame, updates: pd.DataFrame) -> Agreement:
    """Count the unequal bits of one iteration, from TOKENS_COMPARED and UPDATES_COMPARED of its tables."""
    joined = updates.merge(tokens, on=TOKEN_KEY, how="left", validate="many_to_one")
    rollout, old = (_float32(tokens, name) for name in ("rollout_logprobs", "old_logprobs"))
    is_first = (joined["epoch"] == 0) & (joined["minibatch"] == 0)
    steps = _step_numbers(joined)
    return Agreement(
        **iteration_agreement(rollout, old, *_step_numbers(joined[is_first]))._asdict(),
        tokens=len(tokens),
        first_minibatch_tokens=int(is_first.sum()),
        update_rows=len(joined),
        unequal_ratios=int(unequal_bits(steps.ratios, np.ones_like(steps.ratios)).sum()),
        unequal_update_values=int(unequal_bits(steps.new_values, steps.values).sum()),
    )


class _StepNumbers(NamedTuple):
    """Ratios of the policy's steps, and values before and in the value model's steps."""

    ratios: Float32
    values: Float32
    new_values: Float32


def _step_numbers(rows: pd.DataFrame) -> _StepNumbers:
    # a ratio may be a recorded NaN, so only clip_flag says that the policy took a step; value steps have no flag
    value_rows = rows[rows["new_values"].notna()]
    return _StepNumbers(
        ratios=_float32(rows[rows["clip_flag"].notna()], "ratios"),
        values=_float32(value_rows, "values"),
        new_values=_float32(value_rows, "new_values"),
    )
