"""Per-token losses. They are not reduced here: the caller gives each token's gradient its weight."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ppo_repro.numerics.elementwise import differentiable_exp
from ppo_repro.ppo.kl import k3_loss


class ClipFlag(IntEnum):
    """Where a token's ratio lies relative to the band, and whether the clip removes its gradient. One per token."""

    NONE = 0  # unchanged: inside the band, or the advantage is 0
    CLIP_HIGH = 1  # above the band, gradient removed
    CLIP_LOW = 2  # below the band, gradient removed
    WRONG_HIGH = 3  # above the band, gradient kept
    WRONG_LOW = 4  # below the band, gradient kept
    CLIP_DUAL = 5  # above the dual clip, gradient removed
    CLIP_COV = 6  # drawn by Clip-Cov, gradient removed
    KL_COV = 7  # chosen by KL-Cov, a penalty added
    BOUND_HIGH = 8  # CISPO's weight is its upper bound, gradient kept
    BOUND_LOW = 9  # CISPO's weight is its lower bound, gradient kept


REMOVING = (ClipFlag.CLIP_HIGH, ClipFlag.CLIP_LOW, ClipFlag.CLIP_DUAL, ClipFlag.CLIP_COV)


def flag_names(flags: Tensor) -> list[str]:
    """The names of clip flags as they are recorded, such as `clip_high`; flags [n] uint8."""
    names = [flag.name.lower() for flag in ClipFlag]
    return [names[flag] for flag in flags.tolist()]


@dataclass(frozen=True)
class Band:
    """The ratios [1 - low, 1 + high]; above `dual` > 1 + high a negative advantage has no gradient either."""

    low: float
    high: float
    dual: float | None = None

    def bounds(self) -> tuple[Tensor, Tensor]:
        """1 - low and 1 + high as float32."""
        return torch.tensor(1.0 - self.low, dtype=torch.float32), torch.tensor(1.0 + self.high, dtype=torch.float32)


def probability_ratios(new_logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """r = exp(log pi_new - log pi_anchor), [n] float32; exactly 1 where both are the same number."""
    assert new_logprobs.shape == anchor_logprobs.shape == (new_logprobs.numel(),)
    return differentiable_exp(new_logprobs - anchor_logprobs)


def clip_flags(ratios: Tensor, advantages: Tensor, band: Band) -> Tensor:
    """The ClipFlag of each token, [n] uint8."""
    assert ratios.shape == advantages.shape == (ratios.numel(),)
    low, high = band.bounds()
    above, below = ratios > high, ratios < low
    flags = torch.full(ratios.shape, ClipFlag.NONE, dtype=torch.uint8)
    flags[above & (advantages > 0)] = ClipFlag.CLIP_HIGH
    flags[below & (advantages < 0)] = ClipFlag.CLIP_LOW
    flags[above & (advantages < 0)] = ClipFlag.WRONG_HIGH
    flags[below & (advantages > 0)] = ClipFlag.WRONG_LOW
    if band.dual is not None:
        flags[(ratios > torch.tensor(band.dual, dtype=torch.float32)) & (advantages < 0)] = ClipFlag.CLIP_DUAL
    return flags


def removes_gradient(flags: Tensor) -> Tensor:
    """Where the clip removes the policy gradient. Bool, in the shape of the flags."""
    return torch.isin(flags, torch.tensor(REMOVING, dtype=torch.uint8))


def clipped_surrogate(ratios: Tensor, advantages: Tensor, band: Band) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) per token, [n] float32. Schulman et al., 2017, equation 7.

    With `dual` c it is -max(min(r A, clip(r) A), c A) where A < 0 (Ye et al., 2020, equation 8); with
    high > low, clip-higher (Yu et al., 2025). The gradient is exactly zero where `removes_gradient` says so
    and that of -r A everywhere else. Selecting by flag instead of `min` keeps that true where r A underflows.
    """
    assert ratios.shape == advantages.shape == (ratios.numel(),)
    low, high = band.bounds()
    flags = clip_flags(ratios, advantages, band)
    bounded = ratios.detach().clamp(low, high)
    if band.dual is not None:
        bounded = torch.where(flags == ClipFlag.CLIP_DUAL, torch.full_like(bounded, band.dual), bounded)
    return -(torch.where(removes_gradient(flags), bounded, ratios) * advantages)


def unclipped_surrogate(ratios: Tensor, advantages: Tensor) -> Tensor:
    """-r A per token, [n] float32: conservative policy iteration. Schulman et al., 2017, equation 6."""
    assert ratios.shape == advantages.shape == (ratios.numel(),)
    return -(ratios * advantages)


def weight_flags(ratios: Tensor, floor: float, cap: float) -> Tensor:
    """Where `cispo_loss` bounds the weight, a ClipFlag each, [n] uint8."""
    assert ratios.shape == (ratios.numel(),)
    flags = torch.full(ratios.shape, ClipFlag.NONE, dtype=torch.uint8)
    flags[ratios > torch.tensor(cap, dtype=torch.float32)] = ClipFlag.BOUND_HIGH
    flags[ratios < torch.tensor(floor, dtype=torch.float32)] = ClipFlag.BOUND_LOW
    return flags


def cispo_loss(new_logprobs: Tensor, ratios: Tensor, advantages: Tensor, floor: float, cap: float) -> Tensor:
    """-sg[clip(r, floor, cap)] A log pi_new per token, [n] float32. MiniMax, 2025, arXiv 2506.13585, equations 4 and 5.

    The ratio is a weight of the policy gradient, and no gradient flows through it; every token keeps one. The paper and
    verl write the bounds as 1 - eps_low and 1 + eps_high; the paper and TRL use no lower bound, here floor 0.
    """
    assert new_logprobs.shape == ratios.shape == advantages.shape == (ratios.numel(),)
    low, high = torch.tensor(floor, dtype=torch.float32), torch.tensor(cap, dtype=torch.float32)
    weights = torch.minimum(torch.maximum(ratios.detach(), low), high)
    return -(weights * advantages * new_logprobs)


def covariance_penalty(log_ratios: Tensor, chosen: Tensor, penalty_coef: float) -> Tensor:
    """beta |log r| on the chosen tokens [n] bool, 0 elsewhere, [n] float32: what KL-Cov adds to -r A.

    The published code and verl take |log r|, where the paper writes KL(old || new) (Cui et al., 2025, section 4.2). Its
    gradient in log pi_new is beta or -beta, and 0 where the ratio is 1.
    """
    assert log_ratios.shape == chosen.shape == (log_ratios.numel(),)
    return torch.where(chosen, log_ratios.abs() * penalty_coef, torch.zeros_like(log_ratios))


def anchor_penalty(log_ratios: Tensor, penalty_coef: float) -> Tensor:
    """beta (r - 1 - log r) per token, [n] float32: what PPO-Penalty adds to -r A. Schulman et al., 2017, equation 8.

    The penalty (k3) is an unbiased estimate of KL(anchor || new) from tokens drawn from the anchor. Its gradient
    in log pi_new, beta (r - 1), is in expectation that of the divergence, and zero before the first step.
    """
    assert log_ratios.shape == (log_ratios.numel(),)
    return k3_loss(-log_ratios) * penalty_coef


def policy_gradient(new_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-log pi A per token, [n] float32: REINFORCE with a baseline. Williams, 1992."""
    assert new_logprobs.shape == advantages.shape == (new_logprobs.numel(),)
    return -(new_logprobs * advantages)


def value_loss(new_values: Tensor, returns: Tensor) -> Tensor:
    """1/2 (V - R)^2 per token, [n] float32."""
    assert new_values.shape == returns.shape == (new_values.numel(),)
    error = new_values - returns
    return error * error * 0.5


def _clip_value(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """The clipped prediction, and where it decides the loss because it is strictly farther from the return."""
    step = (new_values - old_values).detach()
    clipped = old_values + step.clamp(-clip_range, clip_range)
    farther = (clipped - returns) * (clipped - returns) > (new_values - returns) * (new_values - returns)
    # without the first condition the rounding of old + (new - old) could count as clipping
    return clipped, (step.abs() > torch.tensor(clip_range, dtype=torch.float32)) & farther


def clipped_value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """1/2 max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2) per token, [n] float32.

    The gradient is exactly zero where the clipped branch is the larger one.
    """
    assert new_values.shape == old_values.shape == returns.shape == (new_values.numel(),)
    clipped, binds = _clip_value(new_values, old_values, returns, clip_range)
    return value_loss(torch.where(binds, clipped, new_values), returns)


def value_clip_binds(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """Where the clipped branch decides `clipped_value_loss`, so that its gradient is zero. [n] bool."""
    assert new_values.shape == old_values.shape == returns.shape == (new_values.numel(),)
    return _clip_value(new_values, old_values, returns, clip_range)[1]
