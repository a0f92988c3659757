"""Compute the weight of each token in the gradient of the policy."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ppo_repro.analysis.clipping.corrections import corrections_of
from ppo_repro.analysis.clipping.flags import ratios_of
from ppo_repro.analysis.clipping.update_rows import STEP, TOKEN, Float64, column
from ppo_repro.base.errors import UserError
from ppo_repro.config.run import RunConfig


def loss_weights(rows: pd.DataFrame, config: RunConfig, tokens: pd.DataFrame) -> Float64:
    """Return the weight of each row's surrogate in the loss of its step, float64: aggregation times correction.

    The aggregation `token_mean` gives 1 / (tokens of the step), `sequence_mean` 1 / (sequences of the step × tokens of
    the sequence) and `sequence_sum` 1 / (sequences of the step). These numbers include counted tokens only; the other
    tokens have weight 0. `corrections_of` computes correction and counted tokens from `tokens`, the whole iteration.
    Raises UserError for another aggregation.
    """
    corrections = corrections_of(tokens, config).join(tokens[TOKEN])
    rows = rows[[*STEP, *TOKEN]].merge(corrections, on=TOKEN, how="left", validate="many_to_one")
    counted = rows["counted"].astype(np.float64)
    lengths = counted.groupby([rows[name] for name in (*STEP, "sequence")], sort=False).transform("sum").to_numpy()
    step = [rows[name] for name in STEP]
    count = counted.groupby(step, sort=False).transform("sum").to_numpy()
    present = rows["sequence"].where(rows["counted"])
    sequences = present.groupby(step, sort=False).transform("nunique").to_numpy(np.float64)
    # if no token is counted, the correction is 0
    count, lengths, sequences = (np.maximum(number, 1.0) for number in (count, lengths, sequences))
    by_kind = {
        "token_mean": 1.0 / count,
        "sequence_mean": 1.0 / (sequences * lengths),
        "sequence_sum": 1.0 / sequences,
    }
    if config.ppo.aggregation not in by_kind:
        kinds = ", ".join(by_kind)
        raise UserError(f"ppo.aggregation = {config.ppo.aggregation}: the clip analyses know {kinds}")
    correction = np.where(rows["counted"], column(rows, "weight"), 0.0)
    return np.asarray(by_kind[config.ppo.aggregation] * correction, dtype=np.float64)


def surrogate_mass(rows: pd.DataFrame, config: RunConfig, tokens: pd.DataFrame) -> Float64:
    """Return w |r A| of each row of a policy step, float64, without the clip; `loss_weights` computes w."""
    return loss_weights(rows, config, tokens) * np.abs(
        ratios_of(column(rows, "log_ratios")) * column(rows, "advantages")
    )
