"""Train on preference pairs: a reward model by Bradley-Terry, a policy by DPO."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.mode import Mode
from ppo_repro.base.ranks import Ranks
from ppo_repro.base.seeding import permutation
from ppo_repro.config.layout import LayoutConfig
from ppo_repro.config.run import NumericsConfig
from ppo_repro.config.tasks import RewardModelTraining
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import policy_logits, sequence_scores
from ppo_repro.models.reward_model import reward_scores
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.interface import Ints, ints
from ppo_repro.numerics.optimizer import SLOTS, Optimizer
from ppo_repro.numerics.sequences import slots_of_rank
from ppo_repro.numerics.sums import mean_of
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.ppo.preferences import (
    bradley_terry_losses,
    dpo_losses,
    dpo_margins,
    preference_accuracy,
    sequence_logprobs,
)
from ppo_repro.preferences.pairs import Preference, check_pairs, sequences_of

Progress = Callable[[int, int, float], None]  # step, last step, loss
# indices of m pairs, slots of their 2 m sequences -> losses and margins, [m] each
LossesOf = Callable[[list[int], Ints], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PreferenceStep:
    """One optimizer step, with losses and margins before it."""

    epoch: int
    minibatch: int
    pairs: int
    loss: float  # nats, mean over pairs
    margin: float  # mean over pairs
    accuracy: float  # ties count one half
    grad_norm: float
    digest: str  # weights after the step
    indices: tuple[int, ...]  # of the pairs of the minibatch
    losses: tuple[float, ...]  # [P] nats, as the margins before the step
    margins: tuple[float, ...]  # [P]


def _pair_chunks(count: int, sequences: int) -> list[list[int]]:
    """Cut 0..count-1 into chunks of at most `sequences` sequences, two per pair, and at least one pair.

    If `sequences` is 0, there is one chunk; without pairs there is none.
    """
    if not count:
        return []
    return [chunk.tolist() for chunk in torch.arange(count).split(max(1, sequences // 2) if sequences else count)]


def preference_steps(
    model: PreTrainedModel,
    optimizer: Optimizer,
    count: int,
    minibatch_size: int,
    micro_batch: int,
    seed: int,
    epoch: int,
    losses_of: LossesOf,
    ranks: Ranks,
) -> Iterator[PreferenceStep]:
    """Train `model` in place for one epoch, on the mean loss of each minibatch of pairs, shuffled by seed.

    The losses are not averaged in autograd: the backward pass of each pair starts from 1 / P, with P pairs in the
    minibatch.

    Args:
        model: policy or reward model.
        optimizer: of the model.
        count: pairs to train on.
        minibatch_size: pairs per optimizer step; the last step may have fewer.
        micro_batch: sequences per backward pass, two per pair; 0: the whole minibatch. Changes no result in
            deterministic numerics.
        seed: of the run.
        epoch: from 0; every epoch has its own shuffle.
        losses_of: returns losses and margins [m] of m pairs.
        ranks: each computes the gradients of its pairs in a minibatch.
    """
    order = torch.from_numpy(permutation(count, "preference minibatches", seed, epoch))
    for number, minibatch in enumerate(order.split(minibatch_size)):
        indices = minibatch.tolist()
        grad_norm, losses, margins = _preference_step(optimizer, indices, micro_batch, losses_of, ranks)
        yield PreferenceStep(
            epoch=epoch,
            minibatch=number,
            pairs=len(indices),
            loss=mean_of(losses),
            margin=mean_of(margins),
            accuracy=preference_accuracy(margins),
            grad_norm=grad_norm,
            digest=weights_digest(model.named_parameters()),
            indices=tuple(indices),
            losses=tuple(losses.tolist()),
            margins=tuple(margins.tolist()),
        )


def _preference_step(
    optimizer: Optimizer, indices: list[int], micro_batch: int, losses_of: LossesOf, ranks: Ranks
) -> tuple[float, Tensor, Tensor]:
    """Take one step on P pairs; return the norm of the gradient, and losses and margins [P] before the step."""
    by_chunk: list[tuple[Tensor, Tensor]] = []
    mine, slots_of_pairs = ranks.mine(len(indices)), slots_of_rank(len(indices), SLOTS, ranks)

    def backward() -> None:
        for chunk in _pair_chunks(len(mine), micro_batch):
            *own, last = slots_of_pairs[chunk[0] : chunk[-1] + 2]
            slots = ints([*np.repeat(own, 2), last])  # both sequences of a pair are in one
            losses, margins = losses_of([indices[mine[i]] for i in chunk], slots)
            torch.autograd.backward(losses, torch.full_like(losses, 1.0 / len(indices)))
            by_chunk.append((losses.detach(), margins.detach()))

    grad_norm = optimizer.step(backward)
    losses, margins = (torch.cat(column) for column in zip(*ranks.gather(by_chunk), strict=True))
    return grad_norm, losses, margins


@dataclass(frozen=True)
class RewardTraining:
    """The training of a reward model; accuracies are on held-out pairs."""

    pairs: tuple[Preference, ...]
    eval_pairs: tuple[Preference, ...]  # held out
    margins_before: tuple[float, ...]  # [P] of the held-out pairs
    margins_after: tuple[float, ...]  # [P]
    steps: tuple[PreferenceStep, ...]

    @property
    def accuracy_after(self) -> float:
        """Return the share of held-out pairs in the right order after training."""
        return preference_accuracy(torch.tensor(self.margins_after))


def train_reward_model(
    model: PreTrainedModel,
    pairs: Sequence[Preference],
    eval_pairs: Sequence[Preference],
    settings: RewardModelTraining,
    numerics: NumericsConfig,
    layout: LayoutConfig,
    seed: int,
    progress: Progress,
    ranks: Ranks,
) -> RewardTraining:
    """Train a model from `make_reward_model` in place on the Bradley-Terry loss.

    The optimizer is the warm start's AdamW, without weight decay.

    Args:
        model: the classifier.
        pairs: to train on.
        eval_pairs: held out; their margins are measured before and after.
        settings: epochs, minibatch size, learning rate.
        numerics: of the training.
        layout: micro-batches and padding.
        seed: of the order.
        progress: called with step, last step and loss in nats per pair after each step.
        ranks: the processes of the run.

    Raises:
        UserError: a pair does not fit the model.
    """
    check_pairs([*pairs, *eval_pairs], model.config.vocab_size, numerics.max_context)
    optimizer = Optimizer(
        model,
        AdamWSettings(learning_rate=settings.learning_rate, beta2=0.98),
        numerics.mode,
        ranks,
    )
    last = settings.epochs * math.ceil(len(pairs) / settings.minibatch_size)

    def losses_of(chunk: list[int], slots: Ints) -> tuple[Tensor, Tensor]:
        scores = sequence_scores(model, sequences_of([pairs[i] for i in chunk]), layout.padding, slots, optimizer.sink)
        chosen, rejected = scores[0::2], scores[1::2]
        return bradley_terry_losses(chosen, rejected), chosen - rejected

    def held_out_margins() -> tuple[float, ...]:
        own = sequences_of([eval_pairs[i] for i in ranks.mine(len(eval_pairs))])
        scores = reward_scores(model, own, layout.padding, layout.forward_micro_batch)
        return tuple(ranks.gather((scores[0::2] - scores[1::2]).tolist()))

    before = held_out_margins()
    steps: list[PreferenceStep] = []
    for epoch in range(settings.epochs):
        taken = preference_steps(
            model,
            optimizer,
            count=len(pairs),
            minibatch_size=settings.minibatch_size,
            micro_batch=layout.update_micro_batch,
            seed=seed,
            epoch=epoch,
            losses_of=losses_of,
            ranks=ranks,
        )
        for step in taken:
            steps.append(step)
            progress(len(steps), last, step.loss)
    return RewardTraining(tuple(pairs), tuple(eval_pairs), before, held_out_margins(), tuple(steps))


def _pair_logprobs(
    policy: PreTrainedModel,
    pairs: Sequence[Preference],
    temperature: float,
    mode: Mode,
    padding: str,
    slots: Ints | None = None,
    sums: GradientSums | None = None,
) -> Tensor:
    """Compute `pair_logprobs`, differentiable, in one forward pass."""
    responses = [response for p in pairs for response in (p.chosen_ids, p.rejected_ids)]
    batch = lay_out([p.prompt_ids for p in pairs for _ in range(2)], responses, padding, slots=slots).with_sums(sums)
    logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, temperature, None, mode)
    return sequence_logprobs(logprobs, torch.tensor([len(response) for response in responses])).view(-1, 2).T


@torch.no_grad()
def pair_logprobs(
    policy: PreTrainedModel,
    pairs: Sequence[Preference],
    temperature: float,
    mode: Mode,
    layout: LayoutConfig,
    ranks: Ranks,
) -> Tensor:
    """Compute log pi(y | x) of the preferred and of the rejected response of each pair, in micro-batches.

    Args:
        policy: the model, in training or frozen.
        pairs: P pairs.
        temperature: log-probs are of the whole distribution softmax(logits / temperature).
        mode: deterministic or native numerics.
        layout: gives padding and the size of micro-batches.
        ranks: each computes some pairs, and gets all.

    Returns:
        [2, P] float64, nats, without gradients.
    """
    mine = ranks.mine(len(pairs))
    by_chunk = [
        _pair_logprobs(policy, [pairs[mine[i]] for i in chunk], temperature, mode, layout.padding)
        for chunk in _pair_chunks(len(mine), layout.forward_micro_batch)
    ]
    return torch.cat(ranks.gather(by_chunk), 1)


def dpo_losses_of(
    policy: PreTrainedModel,
    optimizer: Optimizer,
    pairs: Sequence[Preference],
    reference: Tensor,
    beta: float,
    temperature: float,
    mode: Mode,
    padding: str,
) -> LossesOf:
    """Return a function that computes the DPO losses of some of the pairs.

    Args:
        policy: is trained.
        optimizer: of the policy.
        pairs: P pairs.
        reference: [2, P] float64, the frozen model's log-probs of all pairs, nats, computed once.
        beta: weight of the implicit KL penalty.
        temperature: the divisor of the logits.
        mode: deterministic or native numerics.
        padding: right, left or none; for native numerics.
    """

    def losses_of(chunk: list[int], slots: Ints) -> tuple[Tensor, Tensor]:
        logprobs = _pair_logprobs(policy, [pairs[i] for i in chunk], temperature, mode, padding, slots, optimizer.sink)
        margins = dpo_margins(logprobs[0], logprobs[1], reference[0, chunk], reference[1, chunk], beta)
        return dpo_losses(margins), margins

    return losses_of
