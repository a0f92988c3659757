"""Advantages of responses of different lengths: GAE, group-relative scores, whitening."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ppo_repro.numerics.sums import mean_of


def gae(
    rewards: Tensor, values: Tensor, lengths: Tensor, final_values: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Compute GAE, A_t = delta_t + gamma lambda A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t.

    Source: Schulman et al., 2016. t counts decisions: the tokens that an environment puts in between two of them belong
    to the transition, and have no error or discount of their own.

    Args:
        rewards: [N] float32, of all tokens, sequence after sequence.
        values: [N] float32, V before each token.
        lengths: [B] int64, tokens of each sequence; their sum is N.
        final_values: [B] float32, V after the last step: 0 if the episode ended, the value of the next state if the
            episode was only cut off.
        gamma: discount per token.
        gae_lambda: 0 is the one-step error, TD(0); 1 is the Monte Carlo return minus the value.

    Returns:
        The advantages, [N] float32.
    """
    assert rewards.shape == values.shape == (int(lengths.sum()),)
    assert final_values.shape == lengths.shape == (lengths.numel(),)
    batch, longest = len(lengths), int(lengths.max())
    inside = torch.arange(longest) < lengths[:, None]
    r, v = torch.zeros(batch, longest), torch.zeros(batch, longest + 1)
    r[inside] = rewards
    v[:, :-1][inside] = values
    v[torch.arange(batch), lengths] = final_values
    advantages, running = torch.zeros(batch, longest), torch.zeros(batch)
    decay = gamma * gae_lambda
    for t in range(longest - 1, -1, -1):
        delta = (r[:, t] + v[:, t + 1] * gamma) - v[:, t]
        # 0 after the last token of a sequence
        running = torch.where(inside[:, t], delta + running * decay, 0.0)
        advantages[:, t] = running
    return advantages[inside]


def group_advantages(scores: Sequence[float], groups: Sequence[Hashable], scale: bool) -> list[float]:
    """Return (s_i - mean of its group) [/ (std of its group + 1e-6) with `scale`], one per response.

    std is the population standard deviation. With `scale`: GRPO (Shao et al., 2024); without: Dr. GRPO (Liu et al.,
    2025).
    Sums are correctly rounded, so the order within a group does not matter. A group of equal scores gets exactly 0.
    """
    assert len(scores) == len(groups)
    members: dict[Hashable, list[float]] = {}
    for score, group in zip(scores, groups, strict=True):
        members.setdefault(group, []).append(score)
    statistics = {}
    for group, values in members.items():
        mean = _mean(values)
        variance = math.fsum((x - mean) * (x - mean) for x in values) / len(values)
        statistics[group] = (mean, math.sqrt(variance) + 1e-6 if scale else 1.0)
    return [(s - statistics[g][0]) / statistics[g][1] for s, g in zip(scores, groups, strict=True)]


def _mean(values: Sequence[float]) -> float:
    """Return the correctly rounded sum divided by the count; of equal values, the value itself.

    The division may miss it by rounding.
    """
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def whiten(values: Tensor, shift: bool = True) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) [+ mean without `shift`] with the population variance.

    [N] float32 -> [N] float32. The order of the elements does not matter. Equal elements become exactly 0; without
    `shift` they do not change.
    """
    assert values.shape == (values.numel(),)
    mean = _mean(values.tolist())
    centred = values.to(torch.float64) - mean
    scale = 1.0 / math.sqrt(mean_of(centred * centred) + 1e-8)
    whitened = centred * scale
    return (whitened if shift else whitened + mean).to(torch.float32)


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns), both [N]; None if the returns do not vary."""
    assert values.shape == returns.shape == (values.numel(),)

    def variance(x: Tensor) -> float:
        x = x.to(torch.float64)
        mean = mean_of(x)
        return mean_of((x - mean) * (x - mean))

    total = variance(returns)
    return 1.0 - variance(returns.to(torch.float64) - values.to(torch.float64)) / total if total > 0 else None
