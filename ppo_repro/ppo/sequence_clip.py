"""GSPO: the clipped surrogate with one ratio for a whole response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.numerics import elementwise
from ppo_repro.numerics.sums import run_sums
from ppo_repro.ppo.clip import Clip


def _lengths(responses: Tensor) -> Tensor:
    return torch.unique_consecutive(responses, return_counts=True)[1]


class _SequenceRatio(Function):
    """The response's ratio at each token, whose derivative in a token's log-prob is the ratio, at that token alone."""

    @staticmethod
    def forward(ctx: Any, log_ratios: Tensor, lengths: Tensor) -> Tensor:
        means = (run_sums(log_ratios, lengths) / lengths).to(torch.float32)
        ratios = torch.repeat_interleave(elementwise.exp(means), lengths)
        ctx.save_for_backward(ratios)
        return ratios

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ratios,) = ctx.saved_tensors
        return grad * ratios, None


@dataclass(frozen=True)
class SequenceClip(Clip):
    """Clip s = exp(mean over the response of log pi_new - log pi_anchor). Zheng et al., 2025, arXiv 2507.18071.

    s is equation 7, differentiated as GSPO-token's sg[s] pi / sg[pi] (equation 14): the gradient at a token is s times
    that of its own log-prob. Where the tokens of a response have one advantage and one loss weight, this is the
    gradient of GSPO itself (equation 5). verl's `gspo` clamps the logarithm at 10.
    """

    def ratios(self, new_logprobs: Tensor, anchor_logprobs: Tensor, responses: Tensor) -> Tensor:
        assert new_logprobs.shape == anchor_logprobs.shape == responses.shape
        return _SequenceRatio.apply(new_logprobs - anchor_logprobs, _lengths(responses))
