"""Correct the losses of tokens for the mismatch of sampler and trainer: importance weights, and rejected tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor

from ppo_repro.config.algorithm import DivergenceRejection, ImportanceWeights, RatioRejection, Rejection, VetoRejection
from ppo_repro.ppo import corrections
from ppo_repro.ppo.corrections import Correction, Corrections


def corrections_of(
    settings: ImportanceWeights | None, rejection: Sequence[Rejection], old: Tensor, sampled: Tensor, lengths: Tensor
) -> Corrections | None:
    """Return importance weights, which are 0 for rejected tokens; None if neither is configured.

    The mean of normalised weights is over all tokens of the iteration, including rejected tokens.

    Args:
        settings: the section `ppo.importance_weights`; None leaves every weight 1 before the rejection.
        rejection: the entries of `ppo.rejection`.
        old: [N] float32, log-probs of the trainer before the update, nats.
        sampled: [N] float32, log-probs of the sampler, nats.
        lengths: [B] int64, tokens of each response; their sum is N.
    """
    if settings is None and not rejection:
        return None
    weights, changes = torch.ones_like(old), torch.full(old.shape, Correction.NONE, dtype=torch.uint8)
    if settings is not None:
        ratios = corrections.importance_ratios(old, sampled, lengths, settings.level)
        bound = corrections.masked_weights if settings.kind == "masked" else corrections.truncated_weights
        weights, changes = bound(ratios, settings.lowest, settings.cap)
        if settings.normalize:
            weights = corrections.normalized_weights(weights, lengths, by_response=settings.level != "token")
    for entry in rejection:
        rejected = _rejected(entry, old, sampled, lengths)
        weights = torch.where(rejected, 0.0, weights)
        changes = torch.where(rejected, torch.tensor(int(Correction.REJECTED), dtype=torch.uint8), changes)
    return Corrections(weights, changes)


def corrected(terms: Tensor, weights: Tensor) -> Tensor:
    """Return the terms [n] of tokens' losses times their weights; 0 for a rejected token, even if its term overflows.

    The zero has the sign of the term, like the product of a finite term.
    """
    return torch.where(weights == 0, torch.zeros_like(terms).copysign(terms.detach()), terms * weights)


def _rejected(entry: Rejection, old: Tensor, sampled: Tensor, lengths: Tensor) -> Tensor:
    """Return which tokens an entry of the configuration rejects, [N] bool."""
    if isinstance(entry, DivergenceRejection):
        return corrections.beyond_divergence(old, sampled, lengths, entry.estimator, entry.level, entry.above)
    if isinstance(entry, RatioRejection):
        ratios = corrections.importance_ratios(old, sampled, lengths, entry.level)
        return corrections.outside_ratio(ratios, entry.low, entry.high)
    if not isinstance(entry, VetoRejection):
        assert_never(entry)
    return corrections.vetoed(corrections.importance_ratios(old, sampled, lengths, "token"), lengths, entry.below)
