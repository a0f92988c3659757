"""The loss of the value model, and the weights with which the losses of tokens are summed."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.ppo.objectives import float32


def value_losses(
    new_values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """Return 1/2 max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2), and which tokens are clipped.

    Args:
        new_values: V, [n] float32, differentiable; its gradient is exactly zero if the second branch is larger.
        old_values: V_old before the update, [n] float32.
        returns: R, [n] float32.
        clip_range: eps; None: 1/2 (V - R)^2.

    Returns:
        The losses [n] float32, not reduced, and [n] bool, true if the second branch is strictly larger.
    """
    assert new_values.shape == old_values.shape == returns.shape == (new_values.numel(),)
    clipped = torch.zeros(new_values.shape, dtype=torch.bool)
    predictions = new_values
    if clip_range is not None:
        step = (new_values - old_values).detach()
        bounded = old_values + step.clamp(-clip_range, clip_range)
        farther = (bounded - returns) * (bounded - returns) > (new_values - returns) * (new_values - returns)
        # without the first condition the rounding of old + (new - old) could count as clipping
        clipped = (step.abs() > float32(clip_range)) & farther
        predictions = torch.where(clipped, bounded, new_values)
    error = predictions - returns
    return error * error * 0.5, clipped


def loss_weights(aggregation: str, lengths: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the weight of each token in a minibatch of S sequences, [M] float32, from `lengths` [S] int64 with sum M.

    token_mean: 1 / M. sequence_mean: 1 / (S length), the mean over sequences of their token means.
    sequence_sum: 1 / S, the mean over sequences of their token sums.

    `counted` [M] bool: as in verl's `agg_loss`, other tokens have weight 0 and count in no length and not in M, and
    sequences without counted tokens do not count in S. If no token is counted, all weights are 0.
    """
    assert lengths.shape == (lengths.numel(),)
    whole = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    if counted is not None:
        assert counted.shape == whole.shape
        lengths = torch.bincount(whole[counted], minlength=len(lengths))
    count, total = max(int((lengths > 0).sum()), 1), max(int(lengths.sum()), 1)
    by_sequence = {
        "token_mean": torch.full((len(lengths),), 1.0 / total, dtype=torch.float64),
        "sequence_mean": 1.0 / (lengths.clamp(min=1).to(torch.float64) * count),
        "sequence_sum": torch.full((len(lengths),), 1.0 / count, dtype=torch.float64),
    }[aggregation]
    weights = by_sequence.to(torch.float32)[whole]
    return weights if counted is None else torch.where(counted, weights, 0.0)
