"""Per-token losses, never reduced here: the caller weighs each token's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics.elementwise import Exp

# disjoint: in the band; outside it with the gradient removed; outside it with the gradient kept
CLIP_FLAGS = ("none", "clip_high", "clip_low", "wrong_high", "wrong_low")


def probability_ratios(new_logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """r = exp(log pi_new - log pi_anchor), float32, exactly 1 where both are the same number."""
    return Exp.apply(new_logprobs - anchor_logprobs)


def _outside(ratios: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """Below 1 - eps, above 1 + eps; strict, on float32 bounds."""
    low = torch.tensor(1.0 - clip_range, dtype=torch.float32)
    high = torch.tensor(1.0 + clip_range, dtype=torch.float32)
    return ratios < low, ratios > high


def clipped_surrogate(ratios: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """-min(r A, clip(r, 1 - eps, 1 + eps) A) per token, float32. Schulman et al., 2017, equation 7.

    The gradient is exactly zero where (A > 0 and r > 1 + eps) or (A < 0 and r < 1 - eps), and that of
    -r A everywhere else. A choice by condition instead of `min` keeps that true where r A underflows.
    """
    low, high = _outside(ratios, clip_range)
    binds = (high & (advantages > 0)) | (low & (advantages < 0))
    bounded = ratios.detach().clamp(1.0 - clip_range, 1.0 + clip_range)
    return -(torch.where(binds, bounded, ratios) * advantages)


def clip_flags(ratios: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """Index into CLIP_FLAGS for each token, uint8. Tokens with advantage 0 are in no clip class."""
    low, high = _outside(ratios, clip_range)
    flags = torch.zeros(ratios.shape, dtype=torch.uint8)
    flags[high & (advantages > 0)] = 1
    flags[low & (advantages < 0)] = 2
    flags[high & (advantages < 0)] = 3
    flags[low & (advantages > 0)] = 4
    return flags


def _clip_value(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """The clipped prediction, and where it decides the loss (strictly farther from the return)."""
    step = (new_values - old_values).detach()
    clipped = old_values + step.clamp(-clip_range, clip_range)
    farther = (clipped - returns) * (clipped - returns) > (new_values - returns) * (new_values - returns)
    # without the first condition the rounding of old + (new - old) could count as clipping
    return clipped, (step.abs() > torch.tensor(clip_range, dtype=torch.float32)) & farther


def clipped_value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """1/2 max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2) per token, float32.

    The gradient is exactly zero where the clipped branch is the larger one.
    """
    clipped, binds = _clip_value(new_values, old_values, returns, clip_range)
    error = torch.where(binds, clipped, new_values) - returns
    return error * error * 0.5


def value_clip_binds(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """Where the clipped branch decides `clipped_value_loss`, so that its gradient is zero. Bool."""
    return _clip_value(new_values, old_values, returns, clip_range)[1]
