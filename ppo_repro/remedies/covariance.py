"""The tokens that Clip-Cov and KL-Cov change, chosen over a whole minibatch before micro-batches split it."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.config.objectives import ClipCovObjective, KLCovObjective
from ppo_repro.config.run import RunConfig
from ppo_repro.ppo import covariance, losses
from ppo_repro.seeding import permutation


def chooses_tokens(config: RunConfig) -> bool:
    """Whether the objective changes tokens that depend on all tokens of their minibatch."""
    return isinstance(config.ppo.objective, ClipCovObjective | KLCovObjective)


def chosen_tokens(
    config: RunConfig, new_logprobs: Tensor, anchor: Tensor, advantages: Tensor, place: tuple[int, int, int]
) -> Tensor:
    """The tokens of a minibatch that are changed, [M] bool, from its log-probs and advantages [M].

    `place` is its iteration, epoch and number. Clip-Cov draws from a stream of the run's seed, so that the choice
    depends on no layout, and leaves out what its clip removes.
    """
    objective = config.ppo.objective
    of_tokens = covariance.covariances(new_logprobs, advantages)
    if isinstance(objective, KLCovObjective):
        return covariance.largest_tokens(of_tokens, objective.share)
    assert isinstance(objective, ClipCovObjective)
    ratios, band = losses.probability_ratios(new_logprobs, anchor), losses.Band(objective.clip_range, objective.high)
    allowed = ~losses.removes_gradient(losses.clip_flags(ratios, advantages, band))
    order = torch.from_numpy(permutation(len(ratios), "clip_cov", config.seed, *place))
    bounds = objective.covariance_low, objective.covariance_high
    return covariance.drawn_tokens(of_tokens, allowed, *bounds, objective.share, order)
