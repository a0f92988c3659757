"""The load-balancing loss of a minibatch: how many of its tokens each expert computes, counted before the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ppo_repro.models.batches import MicroBatch
from ppo_repro.models.networks import hidden_states
from ppo_repro.numerics.layers.experts import ExactRouter
from ppo_repro.numerics.layers.families import trunk_of
from ppo_repro.numerics.layers.routes import routers, seen_routes
from ppo_repro.ppo.balancing import Balance
from ppo_repro.ranks import Ranks
from ppo_repro.stages.objective import Objective


def with_balances(objective: Objective, mine: Sequence[MicroBatch], tokens: int, ranks: Ranks) -> Objective:
    """The objective with the load-balancing loss of a minibatch of `tokens`, from a forward pass over all of it.

    Counts are integers of the whole minibatch, all ranks together, so no layout shows. The objective as it is where
    `ppo.load_balancing_coef` is 0.
    """
    policy = objective.policy
    coefficient = policy.terms.config.ppo.load_balancing_coef
    if not coefficient:
        return objective
    trunk = trunk_of(policy.state.policy)
    exact = [router for router in routers(trunk) if isinstance(router, ExactRouter)]
    experts = len(exact[0].weight)
    counted = torch.zeros(len(exact), experts, dtype=torch.int64)
    with torch.no_grad(), seen_routes(trunk) as seen:
        for m in mine:
            hidden_states(trunk, m.batch, replay=True)
            counted += _counts(seen.take()[m.batch.is_real.flatten()], len(exact), experts)
    total = torch.stack(ranks.gather([counted])).sum(0)
    balances = tuple(Balance(row, tokens, coefficient / len(exact)) for row in total.unbind(0))
    return replace(objective, policy=replace(policy, balances=balances))


def _counts(routes: Tensor, layers: int, experts: int) -> Tensor:
    """Tokens of each expert of each layer, int64 [M, E]; routes [T, M k]."""
    by_layer = routes.to(torch.int64).view(len(routes), layers, -1)
    return torch.stack([layer.flatten().bincount(minlength=experts) for layer in by_layer.unbind(1)])
