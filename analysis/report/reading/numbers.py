"""Key numbers of a run as tables: over all iterations, and of the first beside the last one."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from analysis.mismatch.parity import Parity
from ppo_repro.records.accuracy import Accuracy


def accuracy_numbers(found: Accuracy | None) -> tuple[tuple[str, pd.DataFrame], ...]:
    """A table of the distances of log-probs from the model in float64; none where nobody measured."""
    if found is None:
        return ()
    rows = (
        ("deterministic", found.deterministic_rms, found.deterministic_max),
        ("stock float32", found.stock_rms, found.stock_max),
    )
    frame = pd.DataFrame(rows, columns=["numerics", "rms, nats", "largest, nats"])
    return ((f"Log-probs of {found.tokens:,} tokens at the start, distance from float64", frame),)


def whole_run_numbers(
    counts: Mapping[str, int], parity: Parity, unit: str, seconds: Mapping[str, float]
) -> pd.DataFrame:
    """quantity, value, unit: `counts` over all iterations, agreement in `unit`, and the seconds of each phase."""
    rows: list[tuple[str, object, str]] = [
        *((name, count, "") for name, count in counts.items()),
        ("unequal old and rollout log-probs", parity.unequal_old_rollout_logprobs, unit),
        ("largest |old - rollout|", parity.max_abs_old_rollout, "nats"),
    ]
    for phase, spent in seconds.items():
        rows.append((f"time, {phase}", round(spent, 1), "s"))
    return pd.DataFrame(rows, columns=["quantity", "value", "unit"])


# name, column of `iterations`, unit
LANGUAGE = (
    ("score, mean", "score_mean", ""), ("accuracy, sampled", "accuracy", ""),
    ("reward per response", "reward_mean", ""),
    ("KL(policy || reference), exact", "ref_kl_per_sequence", "nats/response"),
    ("KL(policy || reference), exact", "ref_kl_per_token", "nats/token"),
    ("entropy", "entropy", "nats/token"), ("response length", "response_length_mean", "tokens"),
    ("cut at the length limit", "truncated_fraction", "share"),
    ("explained variance", "explained_variance", ""), ("kl_coef", "kl_coef", ""),
)  # fmt: skip
CONTROL = (
    ("return of the episodes that ended, mean", "episode_return_mean", "reward"),
    ("episodes that ended", "episodes", ""), ("entropy", "entropy", "nats/step"),
    ("explained variance", "explained_variance", ""),
)  # fmt: skip
# the same of `steps`
LANGUAGE_STEPS = (
    ("clip fraction, mean of the steps", "clip_fraction", "share"),
    ("KL(anchor || new), k3, mean of the steps", "approx_kl", "nats/token"),
    ("gradient norm, mean of the steps", "grad_norm", ""),
)
CONTROL_STEPS = (
    ("clip fraction, mean of the steps", "clip_fraction", "share"),
    ("KL(rollout || new), k3, mean of the steps", "approx_kl", "nats/step"),
    ("gradient norm of both networks, mean of the steps", "joint_grad_norm", ""),
)
Named = tuple[tuple[str, str, str], ...]


def first_and_last_numbers(
    iterations: pd.DataFrame, steps: pd.DataFrame, columns: Named = LANGUAGE, of_steps: Named = LANGUAGE_STEPS
) -> pd.DataFrame:
    """quantity, first, last, unit: recorded values of the first and of the last iteration."""
    by_step = steps.groupby("iteration")[[column for _, column, _ in of_steps]].mean()
    rows = [
        (name, float(frame[column].iloc[0]), float(frame[column].iloc[-1]), unit)
        for frame, named in ((iterations, columns), (by_step, of_steps))
        for name, column, unit in named
    ]
    return pd.DataFrame(rows, columns=["quantity", "first", "last", "unit"])
