"""The clipped surrogate of PPO, with clip-higher and dual clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.ppo.objective import ClipFlag, Objective, float32, no_flags, removes_gradient


@dataclass(frozen=True)
class Clip(Objective):
    """-min(r A, clip(r, 1 - low, 1 + high) A). Schulman et al., 2017, equation 7; high > low: Yu et al., 2025.

    With `dual` c > 1 + high it is -max(min(r A, clip(r) A), c A) where A < 0 (Ye et al., 2020, equation 8).
    """

    low: float
    high: float
    dual: float | None = None

    def surrogates(
        self, ratios: Tensor, advantages: Tensor, new_logprobs: Tensor, chosen: Tensor | None = None
    ) -> Tensor:
        # chosen by flag instead of by min, so that a removed gradient is exactly 0 where r A underflows too
        assert ratios.shape == advantages.shape == (ratios.numel(),)
        flags = self._clip_flags(ratios, advantages)
        bounded = ratios.detach().clamp(float32(1.0 - self.low), float32(1.0 + self.high))
        if self.dual is not None:
            bounded = torch.where(flags == ClipFlag.CLIP_DUAL, torch.full_like(bounded, self.dual), bounded)
        return -(torch.where(removes_gradient(flags), bounded, ratios) * advantages)

    def flags(self, ratios: Tensor, advantages: Tensor, chosen: Tensor | None = None) -> Tensor:
        return self._clip_flags(ratios, advantages)

    def _clip_flags(self, ratios: Tensor, advantages: Tensor) -> Tensor:
        assert ratios.shape == advantages.shape == (ratios.numel(),)
        above, below = ratios > float32(1.0 + self.high), ratios < float32(1.0 - self.low)
        flags = no_flags(ratios)
        flags[above & (advantages > 0)] = ClipFlag.CLIP_HIGH
        flags[below & (advantages < 0)] = ClipFlag.CLIP_LOW
        flags[above & (advantages < 0)] = ClipFlag.WRONG_HIGH
        flags[below & (advantages > 0)] = ClipFlag.WRONG_LOW
        if self.dual is not None:
            flags[(ratios > float32(self.dual)) & (advantages < 0)] = ClipFlag.CLIP_DUAL
        return flags
