"""The load-balancing loss of a mixture of experts, of one layer. Fedus et al., 2022 (Switch), equations 4 to 6.

L = E sum_e f_e P_e with f_e = c_e / T the share of the T tokens that expert e computes (c_e of them; with k experts per
token the shares add up to k) and P_e the mean of its router probabilities; k where all is even. f is no function of the
weights but where a choice flips, so it is a constant, and dL/dlogit_te = E / T p_te (f_e - sum_e' f_e' p_te').

With one layer it is the `load_balancing_loss_func` of transformers. That one counts tokens and probabilities of all
layers together, so that one layer may make up for another; here each layer has a loss, and they are averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Balance:
    """What the loss of one layer needs of a whole minibatch."""

    counts: Tensor  # [E] int64, tokens of each expert
    tokens: int  # T of the minibatch, prompts included
    weight: float  # of the layer's loss


def load_balancing_loss(probs: Tensor, balance: Balance) -> float:
    """weight E sum_e f_e P_e; probs [T, E] float64. Sums are correctly rounded, so the order of tokens is no matter."""
    assert probs.shape == (balance.tokens, len(balance.counts))
    masses = [math.fsum(column.tolist()) for column in probs.unbind(-1)]
    pairs = zip(balance.counts.tolist(), masses, strict=True)
    return math.fsum(count * mass for count, mass in pairs) * _scale(balance)


def logit_gradients(probs: Tensor, balance: Balance) -> Tensor:
    """dL/dlogits of some tokens, probs [n, E] float64 -> [n, E] float64: weight E / T^2 p (c - sum_e c_e p_e).

    The sum over experts is taken by rising index.
    """
    assert probs.shape[-1:] == balance.counts.shape
    counts = balance.counts.to(probs)
    terms = (probs * counts).unbind(-1)
    mean = terms[0]
    for term in terms[1:]:
        mean = mean + term
    return (counts - mean[:, None]) * probs * _scale(balance)


def _scale(balance: Balance) -> float:
    return balance.weight * len(balance.counts) / balance.tokens / balance.tokens
