"""Divide the responses of an iteration into minibatches, and plan the optimizer steps on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_repro.base.processes import SLOTS
from ppo_repro.base.ranks import Ranks
from ppo_repro.base.seeding import permutation
from ppo_repro.buffers import PolicyUpdate, Rollout
from ppo_repro.config.algorithm import SeparateValue
from ppo_repro.config.layout import LayoutConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import MicroBatch, micro_batches
from ppo_repro.numerics.sequences import slots_of_rank
from ppo_repro.ppo.losses import loss_weights
from ppo_repro.stages.training_batch import TrainingBatch


def minibatches(sequences: int, size: int, seed: int, iteration: int, epoch: int) -> list[Tensor]:
    """Cut a random permutation of 0..sequences-1 into minibatches, int64 [size] each, and sort each.

    Every iteration and epoch has its own permutation. The last minibatch may have fewer responses.
    """
    order = torch.from_numpy(permutation(sequences, "minibatches", seed, iteration, epoch))
    return [chunk.sort().values for chunk in order.split(size)]


class PlannedStep(NamedTuple):
    """One minibatch of one epoch, and which models take a step on it."""

    epoch: int
    minibatch: int
    sequences: Tensor  # [S] int64, the responses of the minibatch, ascending
    of_policy: bool  # with any value head on the policy's trunk
    of_value: bool  # a value model with a trunk of its own


@dataclass
class Schedule:
    """The steps of one iteration: policy and value model each have a number of epochs, over the same minibatches.

    After a minibatch with more KL than `early_stop_kl`, the policy takes no further step.
    """

    config: RunConfig
    iteration: int
    stopped: bool = False

    def planned_steps(self, sequences: int) -> Iterator[PlannedStep]:
        """Yield the steps on so many responses in order, until no model takes a step."""
        ppo, value, seed = self.config.ppo, self.config.value, self.config.seed
        value_epochs = value.epochs or ppo.epochs if isinstance(value, SeparateValue) else 0
        for epoch in range(max(ppo.epochs, value_epochs)):
            for number, chosen in enumerate(minibatches(sequences, ppo.minibatch_size, seed, self.iteration, epoch)):
                of_policy, of_value = epoch < ppo.epochs and not self.stopped, epoch < value_epochs
                if not (of_policy or of_value):
                    return
                yield PlannedStep(epoch, number, chosen, of_policy, of_value)

    def follow(self, update: PolicyUpdate) -> None:
        """Stop the policy's steps if its KL in this step exceeded `early_stop_kl`."""
        limit = self.config.ppo.early_stop_kl
        self.stopped = limit is not None and update.approx_kl > limit


@dataclass(frozen=True)
class Minibatch:
    """The M tokens of one optimizer step."""

    tokens: Tensor  # [M] int64 index into the [N] fields
    loss_weights_of_all: Tensor  # [N] float32, weight of each token's loss in the step; 0 outside the minibatch
    micro_batches: tuple[MicroBatch, ...]  # of this rank's sequences

    @property
    def loss_weights(self) -> Tensor:
        """Return the weights of the minibatch's tokens, [M] float32."""
        return self.loss_weights_of_all[self.tokens]


def minibatch_of(
    aggregation: str,
    batch: TrainingBatch,
    sequences: Tensor,
    micro_batches: Sequence[MicroBatch] = (),
) -> Minibatch:
    """Make the minibatch of one step: its tokens, and the weight of each in the loss.

    Args:
        sequences: [S] int64, the responses of the minibatch, ascending.
        micro_batches: of this rank's responses; empty if no model computes the step.
    """
    rollout = batch.rollout
    tokens = rollout.tokens_of(sequences)
    in_losses = None if batch.in_losses is None else batch.in_losses[tokens]
    weights = torch.zeros(len(rollout.response_ids))
    weights[tokens] = loss_weights(aggregation, rollout.lengths[sequences], in_losses)
    return Minibatch(tokens, weights, tuple(micro_batches))


def micro_batches_of_rank(
    layout: LayoutConfig, replay_routes: bool, rollout: Rollout, sequences: Tensor, ranks: Ranks
) -> list[MicroBatch]:
    """Lay out this rank's responses of a minibatch for passes with gradients.

    Args:
        replay_routes: whether the sampler's routes replace the routers' choice.
        sequences: [S] int64, the responses of the minibatch, ascending.
    """
    mine = sequences[torch.tensor(ranks.mine(len(sequences)), dtype=torch.int64)]
    slots = slots_of_rank(len(sequences), SLOTS, ranks)
    return micro_batches(rollout, mine, layout.update_micro_batch, layout.padding, replay_routes, slots)
