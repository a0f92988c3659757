"""Losses of preference pairs, per pair and never reduced here: the caller weighs each pair's gradient.

Of a pair y_w is preferred to y_l. Log-probs are those of whole responses: sums over their tokens, nats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.numerics.arithmetic.grid import exact_sums
from ppo_repro.numerics.arithmetic.logistic import Softplus


class _SequenceSums(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(lengths)
        return exact_sums(values, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (lengths,) = ctx.saved_tensors
        return torch.repeat_interleave(grad, lengths).to(torch.float32), None


def sequence_logprobs(token_logprobs: Tensor, lengths: Tensor) -> Tensor:
    """log pi(y | x) = sum_t log pi(y_t | x, y_<t): [N] float32, lengths [B] with sum N -> [B] float64, differentiable.

    Each sum is correctly rounded, so the order of a response's tokens in memory cannot matter.
    """
    return _SequenceSums.apply(token_logprobs, lengths)


def bradley_terry_losses(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """-log sigma(s_w - s_l) per pair, of the type of the scores. Bradley and Terry, 1952; Ouyang et al., 2022, eq. 1.

    The gradient in s_w is -sigma(s_l - s_w): nearly -1 on a pair in the wrong order, never exactly 0.
    """
    return Softplus.apply(rejected_scores - chosen_scores)


def implicit_rewards(logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> Tensor:
    """beta (log pi - log ref) per response: its reward up to a constant of the prompt. Rafailov et al., 2023, eq. 5."""
    return (logprobs - ref_logprobs) * beta


def dpo_margins(
    chosen_logprobs: Tensor, rejected_logprobs: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> Tensor:
    """Implicit reward of y_w minus that of y_l, per pair, of the type of the log-probs (float64 from sums)."""
    return ((chosen_logprobs - ref_chosen) - (rejected_logprobs - ref_rejected)) * beta


def dpo_losses(margins: Tensor) -> Tensor:
    """-log sigma(margin) per pair, `dpo_margins` given. Rafailov et al., 2023, eq. 7.

    The gradient in log pi(y_w) is -beta sigma(-margin), in log pi(y_l) the opposite: a pair counts by how wrong
    its order is. A large beta keeps the optimum, ref exp(r / beta), close to the reference; a small one does not.
    """
    return Softplus.apply(-margins)


def preference_accuracy(margins: Tensor) -> float:
    """Share of pairs whose margin is positive; a margin of exactly 0 counts one half, as a guess would."""
    right, tied = int((margins > 0).sum()), int((margins == 0).sum())
    return (right + 0.5 * tied) / len(margins)
