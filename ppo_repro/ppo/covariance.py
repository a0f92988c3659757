"""Which tokens Clip-Cov and KL-Cov change. Cui et al., 2025, "The Entropy Mechanism", arXiv 2505.22617.

The covariance of a token is (log pi_new - its mean)(A - its mean), with means over the whole minibatch. A step along
tokens of high covariance lowers the entropy. verl computes the means, the number of tokens and the choice for each
micro-batch, so that there a memory setting changes which tokens are changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics.sums import mean_of


def covariances(new_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """(log pi_new - mean)(A - mean) per token of a minibatch, [M] float64. Cui et al., 2025, section 4.2."""
    assert new_logprobs.shape == advantages.shape == (new_logprobs.numel(),)
    x, y = new_logprobs.detach().to(torch.float64), advantages.to(torch.float64)
    return (x - mean_of(x)) * (y - mean_of(y))


def chosen_count(share: float, tokens: int) -> int:
    """How many tokens a share of a minibatch is: rounded down, and at least 1, as in the published code."""
    return max(int(share * tokens), 1)


def drawn_tokens(covariance: Tensor, allowed: Tensor, low: float, high: float, share: float, order: Tensor) -> Tensor:
    """The tokens whose gradient Clip-Cov drops, [M] bool: a random `share` of M among those with low < cov < high.

    `allowed` [M] bool leaves out those that the clip removes already, as the published code does; `order` [M] int64 is
    a random permutation of the minibatch's tokens, of which the first that qualify are drawn.
    """
    assert covariance.shape == allowed.shape == order.shape == (covariance.numel(),)
    qualified = allowed & (covariance > low) & (covariance < high)
    picked = order[qualified[order]][: chosen_count(share, len(order))]
    drawn = torch.zeros(len(order), dtype=torch.bool)
    drawn[picked] = True
    return drawn


def largest_tokens(covariance: Tensor, share: float) -> Tensor:
    """The tokens that KL-Cov penalises, [M] bool: the `share` of M with the largest covariance, of equals the first."""
    assert covariance.shape == (covariance.numel(),)
    count = chosen_count(share, len(covariance))
    picked = torch.sort(covariance, descending=True, stable=True).indices[:count]
    largest = torch.zeros(len(covariance), dtype=torch.bool)
    largest[picked] = True
    return largest
