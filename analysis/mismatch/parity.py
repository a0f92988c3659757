"""Count the bits in which sampler and trainer differ, from the records; a run itself counts while it computes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.pairs.runs import KEY
from ppo_repro.records import reader
from ppo_repro.statistics.bits import unequal_bits

TOKENS = [*KEY, "rollout_logprobs", "old_logprobs", "values"]
UPDATES = [*KEY, "epoch", "minibatch", "ratios", "new_values"]


@dataclass(frozen=True)
class Parity:
    """Counts over some iterations; `+` adds others. Log-probs are in nats; `unequal` means different in any bit."""

    tokens: int
    unequal_old_rollout_logprobs: int
    max_abs_old_rollout: float
    first_minibatch_tokens: int
    unequal_first_ratios: int
    unequal_values: int
    update_rows: int
    unequal_ratios: int  # over all epochs and minibatches; 0 only if the weights never moved
    unequal_update_values: int

    def __add__(self, other: Parity) -> Parity:
        sums: dict[str, Any] = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        largest = float(np.maximum(self.max_abs_old_rollout, other.max_abs_old_rollout))  # NaN stays NaN
        return Parity(**sums | {"max_abs_old_rollout": largest})


def _float32(frame: pd.DataFrame, column: str) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(frame[column].to_numpy(), dtype=np.float32)


def parity(run_dir: Path | str) -> Parity:
    """Count the unequal bits in a complete run's records, one iteration in memory at a time.

    Raises UserError on missing or damaged records.
    """
    recorded = reader.open_manifest(run_dir)

    def of_one(iteration: int) -> Parity:
        which: dict[str, Any] = {"iterations": [iteration], "recorded": recorded}
        tokens = reader.read_tokens(run_dir, columns=TOKENS, **which)
        return parity_of(tokens, reader.read_updates(run_dir, columns=UPDATES, **which))

    return reduce(add, map(of_one, range(recorded.num_iterations)))


def parity_of(tokens: pd.DataFrame, updates: pd.DataFrame) -> Parity:
    """Count the unequal bits of one iteration, from the columns TOKENS and UPDATES of its tables."""
    joined = updates.merge(tokens, on=KEY, how="left", validate="many_to_one")
    first = joined[(joined["epoch"] == 0) & (joined["minibatch"] == 0)]
    rollout, old = _float32(tokens, "rollout_logprobs"), _float32(tokens, "old_logprobs")

    def ratios(frame: pd.DataFrame) -> int:
        # null where the policy took no step
        ratios_of_steps = _float32(frame[frame["ratios"].notna()], "ratios")
        return int(unequal_bits(ratios_of_steps, np.ones_like(ratios_of_steps)).sum())

    def values(frame: pd.DataFrame) -> int:
        value_steps = frame[frame["new_values"].notna()]
        return int(unequal_bits(_float32(value_steps, "new_values"), _float32(value_steps, "values")).sum())

    return Parity(
        tokens=len(tokens),
        unequal_old_rollout_logprobs=int(unequal_bits(old, rollout).sum()),
        max_abs_old_rollout=float(np.abs(old - rollout).max()),
        first_minibatch_tokens=len(first),
        unequal_first_ratios=ratios(first),
        unequal_values=values(first),
        update_rows=len(joined),
        unequal_ratios=ratios(joined),
        unequal_update_values=values(joined),
    )
