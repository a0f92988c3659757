"""The batches that the user's functions get: tokens of whole responses, one response after the other, no padding.

Log-probs and entropies are in nats. Sums and means by response or prompt are rounded once, so their bits are the same
on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.numerics.sums import run_sums


class ResponseSums(Function):
    """Sums consecutive tokens, [n] -> [R] float64, each sum rounded once; backward, a token gets its sum's gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(lengths)
        ctx.dtype = values.dtype
        return run_sums(values, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (lengths,) = ctx.saved_tensors
        return torch.repeat_interleave(grad, lengths).to(ctx.dtype), None


class _OfTokens(Function):
    """Gives each token its response's value; backward, the response gets the sum of its tokens' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(lengths)
        return torch.repeat_interleave(values, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (lengths,) = ctx.saved_tensors
        return run_sums(grad, lengths).to(grad.dtype), None


@dataclass(frozen=True)
class Tokens:
    """The n tokens of R whole responses."""

    responses: Tensor  # [n] int64, number of the response in the iteration
    groups: Tensor  # [n] int64, number of its prompt in the iteration
    positions: Tensor  # [n] int64, of the token in its response, from 0
    lengths: Tensor  # [n] int64, tokens of its response

    @property
    def response_lengths(self) -> Tensor:
        """Return the number of tokens of each response, [R] int64."""
        return self.lengths[self.positions == 0]

    @property
    def response_groups(self) -> Tensor:
        """Return the number of each response's prompt, [R] int64."""
        return self.groups[self.positions == 0]

    def response_sums(self, values: Tensor) -> Tensor:
        """Return the sum over each response: [n] -> [R], differentiable."""
        return ResponseSums.apply(values, self.response_lengths).to(values.dtype)

    def response_means(self, values: Tensor) -> Tensor:
        """Return the mean over each response: [n] -> [R], differentiable."""
        return self.response_sums(values) / self.response_lengths.to(values.dtype)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return for each token its response's value: [R] -> [n], differentiable, with exact sums of gradients."""
        return _OfTokens.apply(values, self.response_lengths)


@dataclass(frozen=True)
class ObjectiveBatch(Tokens):
    """The tokens of a micro-batch, for an objective.

    The layout of a run decides which responses are together, so a response's loss must not depend on other responses.
    """

    new_logprobs: Tensor  # [n] float32, of the policy that is trained; has a gradient
    entropies: Tensor  # [n] float32, of the same policy; has a gradient
    ratios: Tensor  # [n] float32, exp(new_logprobs - anchor_logprobs); has a gradient
    anchor_logprobs: Tensor  # [n] float32, rollout or old ones, as `ppo.ratio_anchor` says
    old_logprobs: Tensor  # [n] float32, of the trainer before the first step
    rollout_logprobs: Tensor  # [n] float32, of the sampler
    ref_logprobs: Tensor  # [n] float32, of the frozen reference
    advantages: Tensor  # [n] float32
    corrections: Tensor  # [n] float32, factor on this loss: the importance weight, 0 for rejected tokens, else 1


@dataclass(frozen=True)
class AdvantageBatch(Tokens):
    """All tokens of an iteration, for an estimator of advantages."""

    rewards: Tensor  # [n] float32, the score as placed, minus the KL penalty, whitened if configured
    values: Tensor | None  # [n] float32, expected sum of rewards from the token on; None without a value model
    scores: Tensor  # [R] float64, of each response

    def group_sums(self, values: Tensor) -> Tensor:
        """Return for each response the sum over all responses to its prompt: [R] -> [R]."""
        numbers = torch.unique(self.response_groups, return_inverse=True)[1]
        order = torch.argsort(numbers, stable=True)
        sums = run_sums(values[order], torch.bincount(numbers))
        return sums.to(values.dtype)[numbers]

    @property
    def group_sizes(self) -> Tensor:
        """Return for each response the number of responses to its prompt, [R] int64."""
        numbers = torch.unique(self.response_groups, return_inverse=True)[1]
        return torch.bincount(numbers)[numbers]


@dataclass(frozen=True)
class ScoreBatch(Tokens):
    """All tokens of an iteration with the scores of their responses, for a placement of rewards."""

    scores: Tensor  # [R] float64, of each response, without the part that `step_ends` placed
    is_finished: Tensor  # [R] bool, ended with an end token
    token_ids: Tensor  # [n] int64
    words: Tensor  # [n] int64, number of the word in the response, from 0
    old_logprobs: Tensor  # [n] float32, of the policy
    ref_logprobs: Tensor  # [n] float32, of the frozen reference
    entropies: Tensor  # [n] float32, of the policy
