"""The loss of the value model."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.ppo.objective import float32


def value_losses(
    new_values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """1/2 max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2) [n] float32, and where the clip decides.

    The gradient is exactly zero where the second branch is strictly larger. `clip_range` None: 1/2 (V - R)^2.
    """
    assert new_values.shape == old_values.shape == returns.shape == (new_values.numel(),)
    clipped = torch.zeros(new_values.shape, dtype=torch.bool)
    predictions = new_values
    if clip_range is not None:
        step = (new_values - old_values).detach()
        bounded = old_values + step.clamp(-clip_range, clip_range)
        farther = (bounded - returns) * (bounded - returns) > (new_values - returns) * (new_values - returns)
        # without the first condition the rounding of old + (new - old) could count as clipping
        clipped = (step.abs() > float32(clip_range)) & farther
        predictions = torch.where(clipped, bounded, new_values)
    error = predictions - returns
    return error * error * 0.5, clipped
