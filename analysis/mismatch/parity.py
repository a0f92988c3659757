"""Count the bits in which sampler and trainer differ, from the records; a run itself counts while it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.pairs.runs import KEY
from ppo_repro.records import reader
from ppo_repro.statistics.bits import unequal_bits


@dataclass(frozen=True)
class Parity:
    """Counts over a whole run. Log-probs are in nats; `unequal` means different in any bit."""

    tokens: int
    unequal_old_rollout_logprobs: int
    max_abs_old_rollout: float
    first_minibatch_tokens: int
    unequal_first_ratios: int
    unequal_values: int
    update_rows: int
    unequal_ratios: int  # over all epochs and minibatches; 0 only if the weights never moved
    unequal_update_values: int


def _float32(frame: pd.DataFrame, column: str) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(frame[column].to_numpy(), dtype=np.float32)


def parity(run_dir: Path | str, *, iterations: Sequence[int] | None = None, allow_incomplete: bool = False) -> Parity:
    """Count the unequal bits in a run's records. Raises UserError on missing or damaged records."""
    tokens = reader.read_tokens(
        run_dir,
        columns=[*KEY, "rollout_logprobs", "old_logprobs", "values"],
        iterations=iterations,
        allow_incomplete=allow_incomplete,
    )
    updates = reader.read_updates(
        run_dir,
        columns=[*KEY, "epoch", "minibatch", "ratios", "new_values"],
        iterations=iterations,
        allow_incomplete=allow_incomplete,
    )
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
