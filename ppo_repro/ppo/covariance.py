"""Clip-Cov and KL-Cov. Cui et al., 2025, "The Entropy Mechanism", arXiv 2505.22617.

The covariance of a token is (log pi_new - its mean)(A - its mean), with means over the whole minibatch. A step along
tokens of high covariance lowers the entropy. verl computes the means, the number of tokens and the choice for each
micro-batch, so that there a memory setting changes which tokens are changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppo_repro.numerics.sums import mean_of
from ppo_repro.ppo.clip import Clip
from ppo_repro.ppo.objective import ClipFlag, Objective, no_flags, probability_ratios, removes_gradient


def covariances(new_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """(log pi_new - mean)(A - mean) per token of a minibatch, [M] float64. Cui et al., 2025, section 4.2."""
    assert new_logprobs.shape == advantages.shape == (new_logprobs.numel(),)
    x, y = new_logprobs.detach().to(torch.float64), advantages.to(torch.float64)
    return (x - mean_of(x)) * (y - mean_of(y))


def _chosen(picked: Tensor, tokens: int) -> Tensor:
    chosen = torch.zeros(tokens, dtype=torch.bool)
    chosen[picked] = True
    return chosen


def _count(share: float, tokens: int) -> int:
    """Return how many tokens a share of a minibatch is: rounded down and at least 1, as in the published code."""
    return max(int(share * tokens), 1)


@dataclass(frozen=True)
class ClipCov(Clip):
    """The clip, and no gradient for a random `share` of the tokens among those with lowest < covariance < highest.

    Tokens whose gradient the clip removes are not drawn, as in the published code.
    """

    chooses_tokens: ClassVar[bool] = True
    share: float = 2e-4
    lowest: float = 1.0
    highest: float = 5.0

    def choose(self, new_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, order: Tensor) -> Tensor:
        covariance = covariances(new_logprobs, advantages)
        clipped = removes_gradient(self._clip_flags(probability_ratios(new_logprobs, anchor_logprobs), advantages))
        qualified = ~clipped & (covariance > self.lowest) & (covariance < self.highest)
        return _chosen(order[qualified[order]][: _count(self.share, len(order))], len(order))

    def surrogates(
        self, ratios: Tensor, advantages: Tensor, new_logprobs: Tensor, chosen: Tensor | None = None
    ) -> Tensor:
        assert chosen is not None
        surrogates = super().surrogates(ratios, advantages, new_logprobs)
        return torch.where(chosen, torch.zeros_like(surrogates), surrogates)

    def flags(self, ratios: Tensor, advantages: Tensor, chosen: Tensor | None = None) -> Tensor:
        assert chosen is not None
        flags = super().flags(ratios, advantages)
        flags[chosen] = ClipFlag.CLIP_COV
        return flags


@dataclass(frozen=True)
class KLCov(Objective):
    """-r A + beta |log r| on the `share` of tokens with the largest covariance; of equal ones the first.

    The published code and verl take |log r|, where the paper writes KL(old || new) (Cui et al., 2025, section 4.2). Its
    gradient in log pi_new is beta or -beta, and 0 where the ratio is 1.
    """

    chooses_tokens: ClassVar[bool] = True
    share: float
    penalty_coef: float

    def choose(self, new_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, order: Tensor) -> Tensor:
        falling = torch.sort(covariances(new_logprobs, advantages), descending=True, stable=True).indices
        return _chosen(falling[: _count(self.share, len(order))], len(order))

    def penalties(self, log_ratios: Tensor, chosen: Tensor | None = None) -> Tensor | None:
        assert chosen is not None
        return torch.where(chosen, log_ratios.abs() * self.penalty_coef, torch.zeros_like(log_ratios))

    def flags(self, ratios: Tensor, advantages: Tensor, chosen: Tensor | None = None) -> Tensor:
        assert chosen is not None
        flags = no_flags(ratios)
        flags[chosen] = ClipFlag.KL_COV
        return flags
