"""Generalized advantage estimation and whitening on ragged tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppo_repro.numerics.grid import exact_mean


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, V after the last token 0.

    rewards, values [N] float32, lengths [B] int64 with sum N -> [N] float32. Every response is an episode
    that ends with its last token, also at the length limit: its score is final. Schulman et al., 2016.
    """
    batch, longest = len(lengths), int(lengths.max())
    inside = torch.arange(longest) < lengths[:, None]
    r, v = torch.zeros(batch, longest), torch.zeros(batch, longest + 1)
    r[inside] = rewards
    v[:, :-1][inside] = values
    advantages, running = torch.zeros(batch, longest), torch.zeros(batch)
    decay = gamma * gae_lambda
    for t in range(longest - 1, -1, -1):
        delta = (r[:, t] + v[:, t + 1] * gamma) - v[:, t]
        # past the end of a short response rewards and values are zero, and so is what runs on from there
        running = delta + running * decay
        advantages[:, t] = running
    return advantages[inside]


def whiten(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8), var the population variance; both means are exactly rounded sums.

    [N] float32 -> [N] float32, independent of the order of the elements.
    """
    mean = exact_mean(values)
    centred = values.to(torch.float64) - mean
    scale = 1.0 / math.sqrt(exact_mean(centred * centred) + 1e-8)
    return (centred * scale).to(torch.float32)


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns); None where the returns do not vary."""

    def variance(x: Tensor) -> float:
        x = x.to(torch.float64)
        mean = exact_mean(x)
        return exact_mean((x - mean) * (x - mean))

    total = variance(returns)
    return 1.0 - variance(returns.to(torch.float64) - values.to(torch.float64)) / total if total > 0 else None
