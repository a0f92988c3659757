"""REINFORCE with a baseline."""

from __future__ import annotations

from torch import Tensor

from ppo_repro.ppo.objective import Objective


class PolicyGradient(Objective):
    """-log pi A. Williams, 1992."""

    def surrogates(
        self, ratios: Tensor, advantages: Tensor, new_logprobs: Tensor, chosen: Tensor | None = None
    ) -> Tensor:
        assert new_logprobs.shape == advantages.shape == (new_logprobs.numel(),)
        return -(new_logprobs * advantages)
