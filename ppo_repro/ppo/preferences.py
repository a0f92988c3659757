"""Losses of preference pairs, one per pair. They are not reduced here: the caller weights each pair's gradient.

In a pair, y_w is preferred to y_l. Log-probs of a response are sums over its tokens, in nats.
"""

from __future__ import annotations

from torch import Tensor

from ppo_repro.numerics.elementwise import differentiable_softplus
from ppo_repro.ppo.own_batches import ResponseSums


def sequence_logprobs(token_logprobs: Tensor, lengths: Tensor) -> Tensor:
    """Return log pi(y | x) = sum_t log pi(y_t | x, y_<t), [B] float64, from [N] float32 and lengths [B] with sum N.

    Each sum is correctly rounded, so the order of a response's tokens in memory cannot matter.
    """
    assert token_logprobs.shape == (int(lengths.sum()),)
    assert lengths.dim() == 1
    return ResponseSums.apply(token_logprobs, lengths)


def bradley_terry_losses(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """Return -log sigma(s_w - s_l) per pair, [P], in the scores' dtype. Bradley and Terry, 1952.

    Ouyang et al., 2022, eq. 1. The gradient in s_w is -sigma(s_l - s_w): nearly -1 on a pair in the wrong order, never
    exactly 0.
    """
    assert chosen_scores.shape == rejected_scores.shape == (chosen_scores.numel(),)
    return differentiable_softplus(rejected_scores - chosen_scores)


def dpo_margins(
    chosen_logprobs: Tensor, rejected_logprobs: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> Tensor:
    """Return the implicit reward of y_w minus the implicit reward of y_l, per pair. Rafailov et al., 2023, eq. 5.

    The implicit reward of a response is beta (log pi - log ref), up to a constant of the prompt.

    Args:
        chosen_logprobs: [P], log pi of y_w, nats; float64 from `sequence_logprobs`.
        rejected_logprobs: [P], log pi of y_l.
        ref_chosen: [P], log ref of y_w.
        ref_rejected: [P], log ref of y_l.
        beta: weight of the implicit KL penalty.

    Returns:
        The margins [P], in the dtype of the log-probs.
    """
    assert chosen_logprobs.shape == rejected_logprobs.shape == (chosen_logprobs.numel(),)
    assert ref_chosen.shape == ref_rejected.shape == chosen_logprobs.shape
    return ((chosen_logprobs - ref_chosen) - (rejected_logprobs - ref_rejected)) * beta


def dpo_losses(margins: Tensor) -> Tensor:
    """Return -log sigma(margin) per pair, [P], from the margins [P] of `dpo_margins`. Rafailov et al., 2023, eq. 7.

    The gradient in log pi(y_w) is -beta sigma(-margin), in log pi(y_l) the opposite: it grows as the pair's order gets
    more wrong. A large beta holds the optimum, ref exp(r / beta), close to the reference.
    """
    assert margins.shape == (margins.numel(),)
    return differentiable_softplus(-margins)


def preference_accuracy(margins: Tensor) -> float:
    """Return the share of margins [P] that are positive. A margin of exactly 0 counts one half."""
    assert margins.shape == (margins.numel(),)
    right, tied = int((margins > 0).sum()), int((margins == 0).sum())
    return (right + 0.5 * tied) / len(margins)
