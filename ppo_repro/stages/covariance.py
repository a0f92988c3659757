"""The tokens that Clip-Cov and KL-Cov change, chosen over a whole minibatch before micro-batches split it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ppo_repro.config.objectives import ClipCovObjective, KLCovObjective
from ppo_repro.config.run import RunConfig
from ppo_repro.ppo import covariance, losses
from ppo_repro.seeding import permutation
from ppo_repro.stages.objective import PolicyTerms


def chooses_tokens(config: RunConfig) -> bool:
    """Whether the objective changes tokens that depend on all tokens of their minibatch."""
    return isinstance(config.ppo.objective, ClipCovObjective | KLCovObjective)


def with_chosen(
    terms: PolicyTerms, tokens: Tensor, new_logprobs: Tensor, iteration: int, epoch: int, minibatch: int
) -> PolicyTerms:
    """The terms with the tokens that are changed in this minibatch of `tokens` [M], by its `new_logprobs` [M].

    Tokens that are in no loss are in no mean and are not chosen. Clip-Cov draws from a stream of the run's seed, so the
    choice depends on no layout. The terms as they are where the objective chooses none.
    """
    config, objective = terms.config, terms.config.ppo.objective
    if terms.corrections is not None and terms.corrections.counted is not None:
        counted = terms.corrections.counted[tokens]
        tokens, new_logprobs = tokens[counted], new_logprobs[counted]
    advantages = terms.advantages[tokens]
    of_tokens = covariance.covariances(new_logprobs, advantages)
    if isinstance(objective, ClipCovObjective):
        assert terms.band is not None
        ratios = losses.probability_ratios(new_logprobs, terms.anchor[tokens])
        allowed = ~losses.removes_gradient(losses.clip_flags(ratios, advantages, terms.band))
        order = torch.from_numpy(permutation(len(tokens), "clip_cov", config.seed, iteration, epoch, minibatch))
        bounds = objective.covariance_low, objective.covariance_high
        changed = covariance.drawn_tokens(of_tokens, allowed, *bounds, objective.share, order)
    elif isinstance(objective, KLCovObjective):
        changed = covariance.largest_tokens(of_tokens, objective.share)
    else:
        return terms
    chosen = torch.zeros(len(terms.anchor), dtype=torch.bool)
    chosen[tokens] = changed
    return replace(terms, chosen=chosen)
