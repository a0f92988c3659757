"""Corrections for tokens that another policy sampled: importance weights, rejection, and their effect on each token.

delta = log pi_old - log pi_rollout of a token, and w = exp(delta); for a whole response, w is the product or the
geometric mean over its tokens. pi_old is the policy before the update, pi_rollout the sampler. No gradient flows
through weights. If both policies agree, every weight is exactly 1 and no token is rejected. A ratio that is not a
number raises NumericsError.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_repro.base.errors import NumericsError
from ppo_repro.numerics import elementwise
from ppo_repro.numerics.sums import mean_of, run_sums
from ppo_repro.ppo import kl


class Correction(IntEnum):
    """How the corrections changed the weight of a token; of several corrections the last one counts."""

    NONE = 0  # the weight is w, or 1 without importance weights
    TRUNCATED_HIGH = 1  # the weight is the upper bound
    TRUNCATED_LOW = 2  # the weight is the lower bound
    MASKED_HIGH = 3  # w is above the upper bound, the weight is 0
    MASKED_LOW = 4  # w is below the lower bound, the weight is 0
    REJECTED = 5  # the token or its response is rejected, the weight is 0


class Corrections(NamedTuple):
    """Importance weights and rejections of N tokens."""

    weights: Tensor  # [N] float32, factor on the surrogate
    changes: Tensor  # [N] uint8, a Correction each


WITHOUT_LOSS = (Correction.MASKED_HIGH, Correction.MASKED_LOW, Correction.REJECTED)


def correction_names(corrections: Tensor) -> list[str]:
    """Return the recorded names of corrections [n] uint8, such as `masked_low`."""
    names = [correction.name.lower() for correction in Correction]
    return [names[correction] for correction in corrections.tolist()]


def removes_loss(corrections: Tensor) -> Tensor:
    """Return where the weight is 0, so that the token has no loss: bool, in the shape of `corrections`."""
    return torch.isin(corrections, torch.tensor(WITHOUT_LOSS, dtype=torch.uint8))


def importance_ratios(old_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor, level: str) -> Tensor:
    """Compute w = pi_old / pi_rollout of each token or of its response; exactly 1 if the log-probs are equal.

    Sums are correctly rounded, so the order of tokens in memory cannot matter. verl, slime and TRL have the same
    levels; AReaL's sequence level is `geometric`. verl and slime clamp the logarithm to [-20, 20]; this function clamps
    it to [-87, 88].

    Args:
        old_logprobs: [N] float32, of the trainer before the update, nats.
        rollout_logprobs: [N] float32, of the sampler, nats.
        lengths: [B] int64, tokens of each response; their sum is N.
        level: with delta = old - rollout log-prob, token: exp(delta); sequence: exp(sum of delta over the response);
            geometric: exp(mean of delta), the length-normalised ratio.

    Returns:
        w, [N] float32.
    """
    assert old_logprobs.shape == rollout_logprobs.shape == (int(lengths.sum()),)
    assert lengths.dim() == 1
    delta = old_logprobs - rollout_logprobs
    _refuse_nan("old_logprobs - rollout_logprobs", delta)
    if level != "token":
        sums = run_sums(delta, lengths)
        of_response = sums / lengths if level == "geometric" else sums
        delta = torch.repeat_interleave(of_response.to(torch.float32), lengths)
    return elementwise.exp(delta)


def _refuse_nan(name: str, values: Tensor) -> None:
    """Raise NumericsError for NaN, because a comparison with a bound never finds NaN."""
    missing = torch.nonzero(torch.isnan(values)).flatten()
    if len(missing):
        raise NumericsError(
            f"{name} of token {int(missing[0])} is not a number ({len(missing)} of {len(values)} tokens): it can be "
            "neither weighted nor rejected; look for NaN and equal infinities in rollout_logprobs and old_logprobs"
        )


def _bounds(low: float, high: float | None) -> tuple[Tensor, Tensor]:
    return torch.tensor(low, dtype=torch.float32), torch.tensor(
        torch.inf if high is None else high, dtype=torch.float32
    )


def truncated_weights(ratios: Tensor, floor: float, cap: float | None) -> Corrections:
    """Clamp w [N] float32 to [floor, cap], or [floor, infinity] if `cap` is None: truncated importance sampling.

    Ionides, 2008; for a sampler's tokens Yao et al., 2025 (TIS): min(w, cap). Without bounds w is the weight of
    decoupled PPO (Hilton et al., 2022, section 3; AReaL). slime's `tis_mode: clip` and TRL's
    `vllm_importance_sampling_clip_min` have a floor; verl and AReaL have none.
    """
    low, high = _bounds(floor, cap)
    changes = torch.full(ratios.shape, Correction.NONE, dtype=torch.uint8)
    changes[ratios > high] = Correction.TRUNCATED_HIGH
    changes[ratios < low] = Correction.TRUNCATED_LOW
    return Corrections(torch.minimum(torch.maximum(ratios, low), high), changes)


def masked_weights(ratios: Tensor, floor: float, cap: float | None) -> Corrections:
    """Return w [N] float32 if floor <= w <= cap, else 0: masked importance sampling.

    By token with both bounds it is IcePop (Ling Team, 2025, arXiv 2510.18855), by response Liu et al., 2025, "When
    Speed Kills Stability". verl and slime bound both sides, by default with 1 / cap; AReaL and earlier TRL bound only
    the upper side, which is a floor of 0.
    """
    low, high = _bounds(floor, cap)
    changes = torch.full(ratios.shape, Correction.NONE, dtype=torch.uint8)
    changes[ratios > high] = Correction.MASKED_HIGH
    changes[ratios < low] = Correction.MASKED_LOW
    return Corrections(torch.where(changes == Correction.NONE, ratios, 0.0), changes)


def normalized_weights(weights: Tensor, lengths: Tensor, by_response: bool) -> Tensor:
    """Divide the weights [N] float32 of an iteration by their mean: self-normalised importance sampling.

    The mean is over tokens, or with `by_response` over responses, which have one weight each. Zeros count. If all
    weights are 0, they stay 0. This is verl's `rollout_is_batch_normalize` and slime's `tis_batch_normalize`. Both use
    the batch of a step's rollout. Rejected tokens are in the mean, as in verl.
    """
    assert weights.shape == (int(lengths.sum()),)
    assert lengths.dim() == 1
    each = weights[torch.cumsum(lengths, 0) - 1] if by_response else weights
    mean = mean_of(each)
    return (weights.to(torch.float64) / mean).to(torch.float32) if mean > 0.0 else weights


def outside_ratio(ratios: Tensor, low: float, high: float) -> Tensor:
    """Return which tokens have w < low or w > high, [N] bool; at a level of responses, all tokens of a response agree.

    This is rejection sampling in verl (`rollout_rs`) and slime (`use_rs`). The level geometric is Geo-RS. verl compares
    -log w with the logarithms of its bounds, so that its "0.6_1.4" is [1/1.4, 1/0.6] here.
    """
    lowest, highest = _bounds(low, high)
    return (ratios < lowest) | (ratios > highest)


def beyond_divergence(
    old_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor, estimator: str, level: str, above: float
) -> Tensor:
    """Return which tokens have an estimate of KL(rollout || old) above a bound.

    verl's `rollout_rs` names such rules token_k2, seq_sum_k3, seq_mean_k3, seq_max_k3 and so on.

    Args:
        old_logprobs: [N] float32, of the trainer before the update, nats.
        rollout_logprobs: [N] float32, of the sampler, nats.
        lengths: [B] int64, tokens of each response; their sum is N.
        estimator: with delta = old - rollout log-prob, k2: delta^2 / 2; k3: exp(delta) - 1 - delta.
        level: of the token, or the sum, mean or maximum (max) over its response.
        above: the largest estimate that is accepted, nats.

    Returns:
        [N] bool; at a level of responses, all tokens of a response agree.
    """
    assert old_logprobs.shape == rollout_logprobs.shape == (int(lengths.sum()),)
    assert lengths.dim() == 1
    log_ratio = (rollout_logprobs - old_logprobs).to(torch.float64)
    _refuse_nan("rollout_logprobs - old_logprobs", log_ratio)
    values = kl.k2(log_ratio) if estimator == "k2" else kl.k3(log_ratio)
    if level == "max":
        values = torch.repeat_interleave(torch.stack([run.max() for run in values.split(lengths.tolist())]), lengths)
    elif level != "token":
        sums = run_sums(values, lengths)
        values = torch.repeat_interleave(sums / lengths if level == "mean" else sums, lengths)
    return values > above


def vetoed(token_ratios: Tensor, lengths: Tensor, below: float) -> Tensor:
    """Return which tokens are in a response that has a token with w < below, [N] bool.

    This is the veto of verl and slime, with `below` 1e-4 there.
    """
    assert token_ratios.shape == (int(lengths.sum()),)
    assert lengths.dim() == 1
    below_it = token_ratios < _bounds(below, None)[0]
    return torch.repeat_interleave(torch.stack([run.any() for run in below_it.split(lengths.tolist())]), lengths)
