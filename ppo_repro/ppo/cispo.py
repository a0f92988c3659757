"""CISPO: the policy gradient with a bounded ratio as its weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.ppo.objective import ClipFlag, Objective, float32, no_flags


@dataclass(frozen=True)
class Cispo(Objective):
    """-sg[clip(r, floor, cap)] A log pi_new. MiniMax, 2025, arXiv 2506.13585, equations 4 and 5.

    No gradient flows through the ratio, and every token has one. The paper and verl write the bounds as 1 - eps_low and
    1 + eps_high; the paper and TRL have no lower bound, here floor 0.
    """

    floor: float
    cap: float

    def surrogates(
        self, ratios: Tensor, advantages: Tensor, new_logprobs: Tensor, chosen: Tensor | None = None
    ) -> Tensor:
        assert new_logprobs.shape == ratios.shape == advantages.shape == (ratios.numel(),)
        weights = torch.minimum(torch.maximum(ratios.detach(), float32(self.floor)), float32(self.cap))
        return -(weights * advantages * new_logprobs)

    def flags(self, ratios: Tensor, advantages: Tensor, chosen: Tensor | None = None) -> Tensor:
        flags = no_flags(ratios)
        flags[ratios > float32(self.cap)] = ClipFlag.BOUND_HIGH
        flags[ratios < float32(self.floor)] = ClipFlag.BOUND_LOW
        return flags
