"""The objectives: surrogate loss, penalty, and the tokens whose gradient is removed.

PolicyGradient, Penalty, Clip (PPO), SequenceClip (GSPO) and Cispo override methods of Objective.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ppo_repro.numerics import elementwise
from ppo_repro.numerics.elementwise import differentiable_exp
from ppo_repro.numerics.sums import run_sums
from ppo_repro.ppo.kl import k3_loss
from ppo_repro.ppo.own_batches import ObjectiveBatch


class ClipFlag(IntEnum):
    """The position of a token's ratio relative to the bounds, and whether its gradient is removed.

    A user's objective may return the numbers, so a flag keeps its number.
    """

    NONE = 0  # unchanged: inside the bounds, or the advantage is 0
    CLIP_HIGH = 1  # above the upper bound, gradient removed
    CLIP_LOW = 2  # below the lower bound, gradient removed
    WRONG_HIGH = 3  # above the upper bound, gradient stays
    WRONG_LOW = 4  # below the lower bound, gradient stays
    CLIP_DUAL = 5  # above the dual clip, gradient removed
    BOUND_HIGH = 8  # CISPO's weight is its upper bound, gradient stays
    BOUND_LOW = 9  # CISPO's weight is its lower bound, gradient stays
    UNKNOWN = 10  # the user's objective does not say


REMOVING = (ClipFlag.CLIP_HIGH, ClipFlag.CLIP_LOW, ClipFlag.CLIP_DUAL)


def flag_names(flags: Tensor) -> list[str]:
    """Return the recorded names of clip flags [n] uint8, such as `clip_high`."""
    names = {int(flag): flag.name.lower() for flag in ClipFlag}
    return [names[flag] for flag in flags.tolist()]


def removes_gradient(flags: Tensor) -> Tensor:
    """Return which flags mean that the policy gradient is removed: bool, in the shape of `flags`."""
    return torch.isin(flags, torch.tensor(REMOVING, dtype=torch.uint8))


def no_flags(like: Tensor) -> Tensor:
    """Return ClipFlag.NONE for every element, uint8."""
    return torch.full(like.shape, ClipFlag.NONE, dtype=torch.uint8)


def float32(number: float) -> Tensor:
    """Round a bound to float32, so that comparisons do not depend on how torch promotes numbers."""
    return torch.tensor(number, dtype=torch.float32)


def probability_ratios(new_logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """Return r = exp(log pi_new - log pi_anchor), [n] float32; exactly 1 if both log-probs are equal."""
    assert new_logprobs.shape == anchor_logprobs.shape == (new_logprobs.numel(),)
    return differentiable_exp(new_logprobs - anchor_logprobs)


class TokenLosses(NamedTuple):
    """What an objective computes of n tokens."""

    surrogates: Tensor  # [n] float32, without the penalty
    penalties: Tensor | None  # [n] float32, added to the surrogates; None if there are none
    flags: Tensor  # [n] uint8, ClipFlag


class Objective:
    """The surrogate -r A without a bound: conservative policy iteration. Schulman et al., 2017, equation 6.

    Other objectives override its methods. Tensors are [n], of the tokens of whole responses. Losses are float32 per
    token and not reduced: the caller gives each token's gradient its weight.
    """

    def ratios(self, new_logprobs: Tensor, anchor_logprobs: Tensor, responses: Tensor) -> Tensor:
        """Return r of each token. `responses` [n] int64 is the number of each token's response."""
        return probability_ratios(new_logprobs, anchor_logprobs)

    def losses(self, batch: ObjectiveBatch) -> TokenLosses:
        """Return surrogate, penalty and ClipFlag of each token."""
        return TokenLosses(
            self.surrogates(batch.ratios, batch.advantages, batch.new_logprobs),
            self.penalties(batch.new_logprobs - batch.anchor_logprobs),
            self.flags(batch.ratios, batch.advantages),
        )

    def surrogates(self, ratios: Tensor, advantages: Tensor, new_logprobs: Tensor) -> Tensor:
        """Return the surrogate loss of each token without the penalty, [n] float32.

        Args:
            ratios: [n] float32.
            advantages: [n] float32.
            new_logprobs: [n] float32, of the present policy.
        """
        assert ratios.shape == advantages.shape == (ratios.numel(),)
        return -(ratios * advantages)

    def penalties(self, log_ratios: Tensor) -> Tensor | None:
        """Return the penalty of each token, which is added to its surrogate, [n] float32; None if there is none."""
        return None

    def flags(self, ratios: Tensor, advantages: Tensor) -> Tensor:
        """Return the ClipFlag of each token, [n] uint8."""
        return no_flags(ratios)


class PolicyGradient(Objective):
    """The loss -log pi A. Williams, 1992."""

    def surrogates(self, ratios: Tensor, advantages: Tensor, new_logprobs: Tensor) -> Tensor:
        assert new_logprobs.shape == advantages.shape == (new_logprobs.numel(),)
        return -(new_logprobs * advantages)


@dataclass(frozen=True)
class Penalty(Objective):
    """The loss -r A + beta (r - 1 - log r). Schulman et al., 2017, equation 8.

    The penalty (k3) is an unbiased estimate of KL(anchor || new) from tokens drawn from the anchor. Its gradient
    in log pi_new, beta (r - 1), is in expectation the divergence's, and zero before the first step.
    """

    penalty_coef: float

    def penalties(self, log_ratios: Tensor) -> Tensor | None:
        return k3_loss(-log_ratios) * self.penalty_coef


@dataclass(frozen=True)
class Clip(Objective):
    """The loss -min(r A, clip(r, 1 - low, 1 + high) A). Schulman et al., 2017, eq. 7; high > low: Yu et al., 2025.

    With `dual` c > 1 + high it is -max(min(r A, clip(r) A), c A) for A < 0 (Ye et al., 2020, equation 8).
    """

    low: float
    high: float
    dual: float | None = None

    def surrogates(self, ratios: Tensor, advantages: Tensor, new_logprobs: Tensor) -> Tensor:
        # chosen by flag instead of min, so that a removed gradient is exactly 0 even if r A underflows
        assert ratios.shape == advantages.shape == (ratios.numel(),)
        flags = self._clip_flags(ratios, advantages)
        bounded = ratios.detach().clamp(float32(1.0 - self.low), float32(1.0 + self.high))
        if self.dual is not None:
            bounded = torch.where(flags == ClipFlag.CLIP_DUAL, torch.full_like(bounded, self.dual), bounded)
        return -(torch.where(removes_gradient(flags), bounded, ratios) * advantages)

    def flags(self, ratios: Tensor, advantages: Tensor) -> Tensor:
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


class _SequenceRatio(Function):
    """Gives each token its response's ratio. The derivative in the token's own log-prob is the ratio, in others 0."""

    @staticmethod
    def forward(ctx: Any, log_ratios: Tensor, lengths: Tensor) -> Tensor:
        means = (run_sums(log_ratios, lengths) / lengths).to(torch.float32)
        ratios = torch.repeat_interleave(elementwise.exp(means), lengths)
        ctx.save_for_backward(ratios)
        return ratios

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ratios,) = ctx.saved_tensors
        return grad * ratios, None


@dataclass(frozen=True)
class SequenceClip(Clip):
    """The clip of s = exp(mean over the response of log pi_new - log pi_anchor). Zheng et al., 2025.

    arXiv 2507.18071: s is equation 7, differentiated as GSPO-token's sg[s] pi / sg[pi] (equation 14): the gradient at a
    token is s times the gradient of its own log-prob. If the tokens of a response have one advantage and one loss
    weight, this is the gradient of GSPO itself (equation 5). verl's `gspo` clamps the logarithm at 10.
    """

    def ratios(self, new_logprobs: Tensor, anchor_logprobs: Tensor, responses: Tensor) -> Tensor:
        assert new_logprobs.shape == anchor_logprobs.shape == responses.shape
        _, lengths = torch.unique_consecutive(responses, return_counts=True)
        return _SequenceRatio.apply(new_logprobs - anchor_logprobs, lengths)


@dataclass(frozen=True)
class Cispo(Objective):
    """The loss -sg[clip(r, floor, cap)] A log pi_new. MiniMax, 2025, arXiv 2506.13585, equations 4 and 5.

    No gradient flows through the ratio, and every token has a gradient. The paper and verl write the bounds as 1 -
    eps_low and 1 + eps_high. The paper and TRL have no lower bound, which is floor 0 here.
    """

    floor: float
    cap: float

    def surrogates(self, ratios: Tensor, advantages: Tensor, new_logprobs: Tensor) -> Tensor:
        assert new_logprobs.shape == ratios.shape == advantages.shape == (ratios.numel(),)
        weights = torch.minimum(torch.maximum(ratios.detach(), float32(self.floor)), float32(self.cap))
        return -(weights * advantages * new_logprobs)

    def flags(self, ratios: Tensor, advantages: Tensor) -> Tensor:
        flags = no_flags(ratios)
        flags[ratios > float32(self.cap)] = ClipFlag.BOUND_HIGH
        flags[ratios < float32(self.floor)] = ClipFlag.BOUND_LOW
        return flags
