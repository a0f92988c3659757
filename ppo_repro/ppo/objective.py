"""The unclipped surrogate, and what every objective answers about the tokens of a minibatch."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

import torch
from torch import Tensor

from ppo_repro.numerics.elementwise import differentiable_exp


class ClipFlag(IntEnum):
    """Where a token's ratio lies relative to the bounds, and whether its gradient is removed. One per token."""

    NONE = 0  # unchanged: inside the bounds, or the advantage is 0
    CLIP_HIGH = 1  # above the upper bound, gradient removed
    CLIP_LOW = 2  # below the lower bound, gradient removed
    WRONG_HIGH = 3  # above the upper bound, gradient stays
    WRONG_LOW = 4  # below the lower bound, gradient stays
    CLIP_DUAL = 5  # above the dual clip, gradient removed
    CLIP_COV = 6  # drawn by Clip-Cov, gradient removed
    KL_COV = 7  # chosen by KL-Cov, a penalty added
    BOUND_HIGH = 8  # CISPO's weight is its upper bound, gradient stays
    BOUND_LOW = 9  # CISPO's weight is its lower bound, gradient stays


REMOVING = (ClipFlag.CLIP_HIGH, ClipFlag.CLIP_LOW, ClipFlag.CLIP_DUAL, ClipFlag.CLIP_COV)


def flag_names(flags: Tensor) -> list[str]:
    """Return the names of clip flags as they are recorded, such as `clip_high`; flags [n] uint8."""
    names = [flag.name.lower() for flag in ClipFlag]
    return [names[flag] for flag in flags.tolist()]


def removes_gradient(flags: Tensor) -> Tensor:
    """Tell where the policy gradient is removed. Bool, in the shape of the flags."""
    return torch.isin(flags, torch.tensor(REMOVING, dtype=torch.uint8))


def no_flags(like: Tensor) -> Tensor:
    """Return ClipFlag.NONE for every element, uint8."""
    return torch.full(like.shape, ClipFlag.NONE, dtype=torch.uint8)


def float32(number: float) -> Tensor:
    """Round a bound to float32, so that comparisons do not depend on how torch promotes numbers."""
    return torch.tensor(number, dtype=torch.float32)


def probability_ratios(new_logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """r = exp(log pi_new - log pi_anchor), [n] float32; exactly 1 where both are the same number."""
    assert new_logprobs.shape == anchor_logprobs.shape == (new_logprobs.numel(),)
    return differentiable_exp(new_logprobs - anchor_logprobs)


class Objective:
    """The surrogate -r A without a bound: conservative policy iteration. Schulman et al., 2017, equation 6.

    Other objectives change some of its answers. Tensors are [n], of the tokens of whole responses; losses are
    float32 per token and not reduced: the caller gives each token's gradient its weight.
    """

    chooses_tokens: ClassVar[bool] = False  # whether it changes tokens that depend on all tokens of their minibatch

    def ratios(self, new_logprobs: Tensor, anchor_logprobs: Tensor, responses: Tensor) -> Tensor:
        """Return r at each token; `responses` int64 numbers the response of each token."""
        return probability_ratios(new_logprobs, anchor_logprobs)

    def choose(self, new_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, order: Tensor) -> Tensor:
        """Choose the tokens [M] of a minibatch that are changed, bool; `order` [M] int64 is a random permutation."""
        raise NotImplementedError

    def surrogates(
        self, ratios: Tensor, advantages: Tensor, new_logprobs: Tensor, chosen: Tensor | None = None
    ) -> Tensor:
        """Return the loss in ratio and advantage; `chosen` bool is what `choose` chose."""
        assert ratios.shape == advantages.shape == (ratios.numel(),)
        return -(ratios * advantages)

    def penalties(self, log_ratios: Tensor, chosen: Tensor | None = None) -> Tensor | None:
        """Return what is added to the surrogates; None if the objective has no penalty."""
        return None

    def flags(self, ratios: Tensor, advantages: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return the ClipFlag of each token, uint8."""
        return no_flags(ratios)
