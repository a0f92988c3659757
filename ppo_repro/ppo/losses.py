"""Per-token losses, never reduced here: the caller weighs each token's gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.numerics.arithmetic.elementwise import Exp
from ppo_repro.ppo.kl import k3_loss

# disjoint: in the band; outside it with the gradient removed; outside it with the gradient kept; beyond the dual clip
CLIP_FLAGS = ("none", "clip_high", "clip_low", "wrong_high", "wrong_low", "clip_dual")
REMOVED = tuple(index for index, name in enumerate(CLIP_FLAGS) if name.startswith("clip_"))


@dataclass(frozen=True)
class Band:
    """Ratios in [1 - low, 1 + high] are trusted; `dual` > 1 + high also ends the pull of a negative advantage."""

    low: float
    high: float
    dual: float | None = None

    def bounds(self) -> tuple[Tensor, Tensor]:
        """1 - low and 1 + high as float32."""
        return torch.tensor(1.0 - self.low, dtype=torch.float32), torch.tensor(1.0 + self.high, dtype=torch.float32)


def probability_ratios(new_logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """r = exp(log pi_new - log pi_anchor), float32, exactly 1 where both are the same number."""
    return Exp.apply(new_logprobs - anchor_logprobs)


def clip_flags(ratios: Tensor, advantages: Tensor, band: Band) -> Tensor:
    """Index into CLIP_FLAGS for each token, uint8. Tokens with advantage 0 are in no clip class."""
    low, high = band.bounds()
    above, below = ratios > high, ratios < low
    flags = torch.zeros(ratios.shape, dtype=torch.uint8)
    flags[above & (advantages > 0)] = 1
    flags[below & (advantages < 0)] = 2
    flags[above & (advantages < 0)] = 3
    flags[below & (advantages > 0)] = 4
    if band.dual is not None:
        flags[(ratios > torch.tensor(band.dual, dtype=torch.float32)) & (advantages < 0)] = 5
    return flags


def removes_gradient(flags: Tensor) -> Tensor:
    """Where the clip takes the policy gradient away. Bool, of the shape of the flags."""
    return torch.isin(flags, torch.tensor(REMOVED, dtype=torch.uint8))


def clipped_surrogate(ratios: Tensor, advantages: Tensor, band: Band) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) per token, float32. Schulman et al., 2017, equation 7.

    With `dual` c it is -max(min(r A, clip(r) A), c A) where A < 0 (Ye et al., 2020, equation 8); with
    high > low, clip-higher (Yu et al., 2025). The gradient is exactly zero where `removes_gradient` says so
    and that of -r A everywhere else. A choice by condition instead of `min` keeps that true where r A underflows.
    """
    low, high = band.bounds()
    flags = clip_flags(ratios, advantages, band)
    bounded = ratios.detach().clamp(low, high)
    if band.dual is not None:
        bounded = torch.where(flags == CLIP_FLAGS.index("clip_dual"), torch.full_like(bounded, band.dual), bounded)
    return -(torch.where(removes_gradient(flags), bounded, ratios) * advantages)


def unclipped_surrogate(ratios: Tensor, advantages: Tensor) -> Tensor:
    """-r A per token, float32: conservative policy iteration. Schulman et al., 2017, equation 6."""
    return -(ratios * advantages)


def penalised_surrogate(ratios: Tensor, log_ratios: Tensor, advantages: Tensor, penalty_coef: float) -> Tensor:
    """-r A + beta (r - 1 - log r) per token, float32. Schulman et al., 2017, equation 8.

    The penalty estimates KL(anchor || new) without bias from tokens drawn from the anchor (k3). Its gradient
    in log pi_new, beta (r - 1), is that of the divergence in expectation and zero before the first step.
    """
    return unclipped_surrogate(ratios, advantages) + k3_loss(-log_ratios) * penalty_coef


def policy_gradient(new_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-log pi A per token, float32: REINFORCE with a baseline. Williams, 1992."""
    return -(new_logprobs * advantages)


def value_loss(new_values: Tensor, returns: Tensor) -> Tensor:
    """1/2 (V - R)^2 per token, float32."""
    error = new_values - returns
    return error * error * 0.5


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
    return value_loss(torch.where(binds, clipped, new_values), returns)


def value_clip_binds(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """Where the clipped branch decides `clipped_value_loss`, so that its gradient is zero. Bool."""
    return _clip_value(new_values, old_values, returns, clip_range)[1]
