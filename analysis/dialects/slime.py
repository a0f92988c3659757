"""slime's `train/*`: every mean is the mean over responses of their token means, one row per step."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.update_rows import IterationRows
from analysis.dialects.definition import Definition, Source
from analysis.dialects.steps import Float64, Step, by_response, exp, policy_steps, step_rows, value_steps
from ppo_repro.errors import UserError

_LOSS = Source("THUDM/slime", "slime/backends/megatron_utils/loss.py", "00c2d6db0f23a4900be6e80a8eb81eebf9e1ebff")
_PPO = Source("THUDM/slime", "slime/utils/ppo_utils.py", "06787cf5798525d9af068135ade88dc795d75821")
_TIS = Source("THUDM/slime", "slime/backends/megatron_utils/loss.py", "main, vanilla_tis_function read in a copy")
_MEAN = "seq_mean_token_mean of a step"
_UNEVEN = "responses count alike, whatever their length"

DEFINITIONS = (
    Definition("train/pg_clipfrac", _PPO, "mean(-clip(r) A > -r A)", "old", _MEAN, f"grad_zero; {_UNEVEN}"),
    Definition("train/ppo_kl", _LOSS, "mean(p - n)", "old", _MEAN, f"k1, unclamped, any sign; {_UNEVEN}"),
    Definition("train/ois", _LOSS, "mean(exp(n - p))", "old", _MEAN, f"mean ratio; {_UNEVEN}"),
    Definition("train/entropy_loss", _LOSS, "mean(entropy of the new policy)", "none", _MEAN, _UNEVEN),
    Definition(
        "train/train_rollout_logprob_abs_diff", _LOSS, "mean |p - g|", "old and rollout", _MEAN, f"nats; {_UNEVEN}"
    ),
    Definition("train/tis", _TIS, "mean(exp(p - g))", "old and rollout", _MEAN, f"before truncation; {_UNEVEN}"),
    Definition("train/tis_abs", _TIS, "mean |exp(p - g) - 1|", "old and rollout", _MEAN, f"twice TV; {_UNEVEN}"),
    Definition(
        "train/tis_clipfrac",
        _TIS,
        "mean(clip(w, tis_clip_low, tis_clip) != w), w = exp(p - g)",
        "old and rollout",
        _MEAN,
        f"bounds 0 and 2 by default here; {_UNEVEN}",
    ),
    Definition(
        "train/value_clipfrac",
        _LOSS,
        "mean(|v - v_old| > value_clip)",
        "none",
        "seq_mean_token_mean of a step, mean over all steps",
        "vf_band_out, so also where the gradient is kept; from value_metrics",
    ),
)


def metrics(item: IterationRows, tis_clip: float = 2.0, tis_clip_low: float = 0.0) -> pd.DataFrame:
    """One row per policy step: slime's keys. Raises UserError where the truncation bounds are out of order."""
    if not 0.0 <= tis_clip_low < tis_clip:
        raise UserError(f"tis_clip_low = {tis_clip_low:g}, tis_clip = {tis_clip:g}: need 0 <= tis_clip_low < tis_clip")
    rows = []
    for step in policy_steps(item):
        ratio, weights = exp(step.new - step.old), exp(step.old - step.rollout)
        bounded = np.clip(ratio, 1.0 - item.rule.low, 1.0 + item.rule.high)
        columns = {
            "train/pg_clipfrac": (-bounded * step.advantages > -ratio * step.advantages).astype(np.float64),
            "train/ppo_kl": step.old - step.new,
            "train/ois": ratio,
            "train/entropy_loss": step.new_entropies,
            "train/train_rollout_logprob_abs_diff": np.abs(step.old - step.rollout),
            "train/tis": weights,
            "train/tis_abs": np.abs(weights - 1.0),
            "train/tis_clipfrac": (np.clip(weights, tis_clip_low, tis_clip) != weights).astype(np.float64),
        }
        rows.append((step, {key: _sample_mean(values, step) for key, values in columns.items()}))
    return step_rows(item, rows)


def _sample_mean(values: Float64, step: Step) -> float:
    return float(by_response(values, step.sequence)[1].mean())


def value_metrics(item: IterationRows) -> pd.DataFrame:
    """One row: train/value_clipfrac; NaN where the run clips no values."""
    rates = []
    for step in value_steps(item) if item.rule.value_range is not None else ():
        outside = (np.abs(step.new - step.old) > item.rule.value_range).astype(np.float64)
        rates.append(float(by_response(outside, step.sequence)[1].mean()))
    value = float(np.mean(rates)) if rates else float("nan")
    return pd.DataFrame([{"iteration": item.iteration, "train/value_clipfrac": value}])
