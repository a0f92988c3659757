"""What did an update achieve compared with what its surrogate promised, and how often did it make things worse?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.clipping.dynamics import overshoot_shares
from analysis.clipping.flags import ratios_of
from analysis.clipping.update_rows import ClipRule, Float64, IterationRows, column, policy_rows
from analysis.clipping.weights import loss_weights
from ppo_repro.config.run import RunConfig


def clipped_surrogates(ratios: Float64, advantages: Float64, rule: ClipRule) -> Float64:
    """min(r A, clip(r) A) per token, and with a dual clip c at least c A where A < 0. Float64; higher is better."""
    bounded = np.clip(ratios, 1.0 - rule.low, 1.0 + rule.high)
    lower = np.minimum(ratios * advantages, bounded * advantages)
    if rule.dual is None:
        return lower
    return np.where(advantages < 0, np.maximum(lower, rule.dual * advantages), lower)


def update_numbers(item: IterationRows, config: RunConfig) -> dict[str, float]:
    """One iteration's row for `update_quality`.

    surrogate_gain: min(r A, clip(r) A) - A as the loss weighs it, over the last epoch (each token at its last
    visit), in units of the advantages. kl_per_sequence: KL(anchor || new) by k3, seq_mean_token_sum, nats, last epoch.
    """
    rows = policy_rows(item)
    last = rows[rows["epoch"] == rows["epoch"].max()]
    ratios, advantages = ratios_of(column(last, "log_ratios")), column(last, "advantages")
    gains = clipped_surrogates(ratios, advantages, item.rule) - advantages
    steps = last.groupby("minibatch").ngroups
    with np.errstate(over="ignore"):
        k3 = np.expm1(column(last, "log_ratios")) - column(last, "log_ratios")
    scores = column(item.sequences, "scores")
    spread = float(scores.var(ddof=1)) if len(scores) > 1 else float("nan")
    return {
        "iteration": item.iteration,
        "policy_steps": rows.groupby(["epoch", "minibatch"]).ngroups,
        "surrogate_gain": float((gains * loss_weights(last, config, item.tokens)).sum()) / steps,
        "kl_per_sequence": float(k3.sum()) / last["sequence"].nunique(),
        **{f"overshoot_{name}": value for name, value in overshoot_shares(rows, item.rule).items()},
        "score_mean": float(scores.mean()),
        "score_variance_of_mean": spread / len(scores),
    }


def update_quality(rows: Sequence[dict[str, float]]) -> pd.DataFrame:
    """One row per iteration: what the surrogate promised, and the next iteration's mean score minus this one's.

    score_gain compares sampled scores on different prompts, so its standard error, score_gain_se, is that of two
    independent means. Both are NaN in the last iteration and where the next one was not read. improved: score_gain > 0.
    """
    table = pd.DataFrame(rows)
    following = table.set_index("iteration").reindex(table["iteration"] + 1)
    table["score_gain"] = following["score_mean"].to_numpy() - table["score_mean"]
    variance = following["score_variance_of_mean"].to_numpy() + table.pop("score_variance_of_mean")
    table["score_gain_se"] = np.sqrt(variance)
    table["improved"] = (table["score_gain"] > 0).where(table["score_gain"].notna())
    return table


def evaluation_gains(
    iterations: pd.DataFrame, final: Mapping[str, float | int | str], eval_prompts: int
) -> pd.DataFrame:
    """One row per stretch between two held-out evaluations: accuracy before and after, and whether it fell.

    From `iterations` (eval_accuracy is measured before the iteration's update) and the manifest's final results. The
    same `eval_prompts` prompts are answered greedily each time, but the answers are not recorded. So se_unpaired is
    that of two independent shares, larger than that of the paired difference unless the answers are negatively
    correlated. worse: accuracy fell.
    """
    evaluations = iterations[iterations["eval_accuracy"].notna()]
    before_iteration = [*evaluations["iteration"].astype(int), int(iterations["iteration"].max()) + 1]
    accuracy = np.array([*evaluations["eval_accuracy"], float(final["eval_accuracy"])])
    variance = accuracy * (1.0 - accuracy) / eval_prompts
    gain = np.diff(accuracy)
    error = np.sqrt(variance[:-1] + variance[1:])
    return pd.DataFrame(
        {
            "from_iteration": before_iteration[:-1],
            "to_iteration": before_iteration[1:],
            "updates": np.diff(before_iteration),
            "accuracy_before": accuracy[:-1],
            "accuracy_after": accuracy[1:],
            "gain": gain,
            "se_unpaired": error,
            "worse": gain < 0,
            "worse_beyond_noise": gain < -1.96 * error,
        }
    )
