"""Train on preference pairs: a reward model by Bradley-Terry, a policy by DPO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.mode import Mode
from ppo_repro.base.processes import SLOTS
from ppo_repro.base.ranks import Ranks
from ppo_repro.base.seeding import permutation
from ppo_repro.config.dpo import DPOUpdate
from ppo_repro.config.layout import LayoutConfig
from ppo_repro.config.numerics import NumericsConfig
from ppo_repro.config.tasks import RewardModelTraining
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import policy_logits, sequence_scores
from ppo_repro.models.reward_model import reward_scores
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.interface import Ints, ints
from ppo_repro.numerics.optimizer import Optimizer
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
from ppo_repro.preferences.preference_pairs import Preference, check_pairs, sequences_of

Progress = Callable[[int, int, str], None]  # step, last step, loss as text
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


@dataclass(frozen=True)
class PairTraining:
    """The training of a model on pairs. `losses_of` gives losses and margins of some of the `count` pairs."""

    model: PreTrainedModel
    optimizer: Optimizer
    losses_of: LossesOf
    count: int
    settings: RewardModelTraining | DPOUpdate  # epochs, and pairs per step
    micro_batch: int  # sequences per backward pass, two per pair; 0: the whole minibatch
    seed: int  # of the run
    ranks: Ranks  # each computes the gradients of its pairs in a minibatch
    progress: Progress

    def epoch(self, number: int) -> list[PreferenceStep]:
        """Train the model in place for an epoch, on the mean loss of each minibatch of pairs, shuffled by seed.

        The losses are not averaged in autograd: the backward pass of each pair starts from 1 / P, with P pairs in the
        minibatch.
        """
        order = torch.from_numpy(permutation(self.count, "preference minibatches", self.seed, number))
        minibatches, steps = order.split(self.settings.minibatch_size), list[PreferenceStep]()
        for minibatch in minibatches:
            steps.append(self._step(number, len(steps), minibatch.tolist()))
            done, last = number * len(minibatches) + len(steps), self.settings.epochs * len(minibatches)
            self.progress(done, last, f"loss {steps[-1].loss:.3f} nats/pair")
        return steps

    def _step(self, epoch: int, number: int, indices: list[int]) -> PreferenceStep:
        by_chunk: list[tuple[Tensor, Tensor]] = []
        mine, slots_of_pairs = self.ranks.mine(len(indices)), slots_of_rank(len(indices), SLOTS, self.ranks)

        def backward() -> None:
            for chunk in _pair_chunks(len(mine), self.micro_batch):
                *own, last = slots_of_pairs[chunk[0] : chunk[-1] + 2]
                slots = ints([*np.repeat(own, 2), last])  # both sequences of a pair are in one
                losses, margins = self.losses_of([indices[mine[i]] for i in chunk], slots)
                torch.autograd.backward(losses, torch.full_like(losses, 1.0 / len(indices)))
                by_chunk.append((losses.detach(), margins.detach()))

        grad_norm = self.optimizer.step(backward)
        losses, margins = (torch.cat(column) for column in zip(*self.ranks.gather(by_chunk), strict=True))
        return PreferenceStep(
            epoch=epoch,
            minibatch=number,
            pairs=len(indices),
            loss=mean_of(losses),
            margin=mean_of(margins),
            accuracy=preference_accuracy(margins),
            grad_norm=grad_norm,
            digest=weights_digest(self.model.named_parameters()),
            indices=tuple(indices),
            losses=tuple(losses.tolist()),
            margins=tuple(margins.tolist()),
        )


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
        numerics: the run's section on numerics.
        layout: the run's section on layout.
        seed: of the run.
        progress: called with step, last step and loss as text after each step.
        ranks: the processes of the run.

    Raises:
        UserError: a pair does not fit the model.
    """
    check_pairs([*pairs, *eval_pairs], model.config.vocab_size, numerics.max_context)
    adamw = AdamWSettings(learning_rate=settings.learning_rate, beta2=0.98)
    optimizer = Optimizer(model, adamw, numerics.mode, ranks)

    def losses_of(chunk: list[int], slots: Ints) -> tuple[Tensor, Tensor]:
        scores = sequence_scores(model, sequences_of([pairs[i] for i in chunk]), layout.padding, slots, optimizer.sink)
        chosen, rejected = scores[0::2], scores[1::2]
        return bradley_terry_losses(chosen, rejected), chosen - rejected

    def held_out_margins() -> tuple[float, ...]:
        own = sequences_of([eval_pairs[i] for i in ranks.mine(len(eval_pairs))])
        scores = reward_scores(model, own, layout.padding, layout.forward_micro_batch)
        return tuple(ranks.gather((scores[0::2] - scores[1::2]).tolist()))

    training = PairTraining(
        model,
        optimizer,
        losses_of,
        count=len(pairs),
        settings=settings,
        micro_batch=layout.update_micro_batch,
        seed=seed,
        ranks=ranks,
        progress=progress,
    )
    before = held_out_margins()
    steps = [step for epoch in range(settings.epochs) for step in training.epoch(epoch)]
    return RewardTraining(tuple(pairs), tuple(eval_pairs), before, held_out_margins(), tuple(steps))


@dataclass(frozen=True)
class PairScorer:
    """A policy, and how it scores the responses of pairs: by the whole distribution softmax(logits / temperature)."""

    policy: PreTrainedModel  # in training or frozen
    temperature: float
    mode: Mode
    layout: LayoutConfig  # gives padding and the size of micro-batches

    @torch.no_grad()
    def logprobs(self, pairs: Sequence[Preference], ranks: Ranks) -> Tensor:
        """Compute log pi(y | x) of the preferred and of the rejected response of each of P pairs, in micro-batches.

        Each rank computes some pairs, and gets all. Returns [2, P] float64, nats, without gradients.
        """
        mine = ranks.mine(len(pairs))
        chunks = _pair_chunks(len(mine), self.layout.forward_micro_batch)
        return torch.cat(ranks.gather([self._in_one_pass([pairs[mine[i]] for i in chunk]) for chunk in chunks]), 1)

    def dpo_losses_of(
        self, pairs: Sequence[Preference], reference: Tensor, beta: float, optimizer: Optimizer
    ) -> LossesOf:
        """Return a function that computes the DPO losses of some of the pairs.

        Args:
            pairs: P pairs.
            reference: [2, P] float64, the frozen model's log-probs of all pairs, nats, computed once.
            beta: weight of the implicit KL penalty.
            optimizer: of the policy.
        """

        def losses_of(chunk: list[int], slots: Ints) -> tuple[Tensor, Tensor]:
            logprobs = self._in_one_pass([pairs[i] for i in chunk], slots, optimizer.sink)
            margins = dpo_margins(logprobs[0], logprobs[1], reference[0, chunk], reference[1, chunk], beta)
            return dpo_losses(margins), margins

        return losses_of

    def _in_one_pass(
        self, pairs: Sequence[Preference], slots: Ints | None = None, sums: GradientSums | None = None
    ) -> Tensor:
        """Compute `logprobs`, differentiable, in one forward pass."""
        prompts = [pair.prompt_ids for pair in pairs for _ in range(2)]
        responses = [response for pair in pairs for response in (pair.chosen_ids, pair.rejected_ids)]
        batch = lay_out(prompts, responses, self.layout.padding, slots=slots).with_sums(sums)
        logits = policy_logits(self.policy, batch)
        logprobs, _ = token_statistics(logits, batch.targets, self.temperature, None, self.mode)
        return sequence_logprobs(logprobs, torch.tensor([len(response) for response in responses])).view(-1, 2).T
