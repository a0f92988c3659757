"""The configured corrections of an iteration: the weight of each token, and what was done to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.buffers import ForwardPass, Rollout
from ppo_repro.config.objectives import DivergenceRejection, RatioRejection, Rejection
from ppo_repro.config.run import RunConfig
from ppo_repro.ppo import corrections as ppo
from ppo_repro.ppo.corrections import Correction


@dataclass(frozen=True)
class Corrections:
    """Constants of an iteration, one for each of its N tokens; the same in every epoch."""

    weights: Tensor  # [N] float32, factor on the surrogate
    changes: Tensor  # [N] uint8, a ppo.corrections.Correction each
    counted: Tensor | None  # [N] bool, the tokens that are in the losses at all; None: all are


def corrections_of(config: RunConfig, rollout: Rollout, forward: ForwardPass) -> Corrections | None:
    """Importance weights times 0 for rejected tokens; None where neither is configured.

    The mean of normalised weights is over all tokens of the iteration, the rejected included.
    """
    ppo_config = config.ppo
    if ppo_config.importance_weights is None and not ppo_config.rejection:
        return None
    weights, changes = _weights(config, rollout, forward)
    for entry in ppo_config.rejection:
        rejected = _rejected(entry, rollout, forward)
        weights = torch.where(rejected, 0.0, weights)
        changes = torch.where(rejected, torch.tensor(int(Correction.REJECTED), dtype=torch.uint8), changes)
    counted = changes < Correction.MASKED_HIGH if ppo_config.rejected_tokens == "left_out" else None
    return Corrections(weights, changes, counted)


def _weights(config: RunConfig, rollout: Rollout, forward: ForwardPass) -> tuple[Tensor, Tensor]:
    old, sampled, lengths = forward.old_logprobs, rollout.rollout_logprobs, rollout.lengths
    settings = config.ppo.importance_weights
    if settings is None:
        return torch.ones_like(old), torch.full(old.shape, Correction.NONE, dtype=torch.uint8)
    ratios = ppo.importance_ratios(old, sampled, lengths, settings.level)
    bound = ppo.masked_weights if settings.kind == "masked" else ppo.truncated_weights
    weights, changes = bound(ratios, settings.lowest, settings.cap)
    if settings.normalize:
        weights = ppo.normalized_weights(weights, lengths, by_response=settings.level != "token")
    return weights, changes


def _rejected(entry: Rejection, rollout: Rollout, forward: ForwardPass) -> Tensor:
    """The tokens that an entry rejects, [N] bool."""
    old, sampled, lengths = forward.old_logprobs, rollout.rollout_logprobs, rollout.lengths
    if isinstance(entry, RatioRejection):
        return ppo.outside_ratio(ppo.importance_ratios(old, sampled, lengths, entry.level), entry.low, entry.high)
    if isinstance(entry, DivergenceRejection):
        return ppo.beyond_divergence(old, sampled, lengths, entry.estimator, entry.level, entry.above)
    return ppo.vetoed(ppo.importance_ratios(old, sampled, lengths, "token"), lengths, entry.below)
