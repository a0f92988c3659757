"""The stages of one iteration computed again from its records, by the functions the run itself used."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ppo_repro.buffers import (
    Coefficients,
    Iteration,
    MinibatchUpdate,
    PolicyUpdate,
    Rewards,
    ValueUpdate,
)
from ppo_repro.config.algorithm import KLInLoss
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import PromiseBroken
from ppo_repro.numerics.optimizer import StepReport
from ppo_repro.replay import recorded
from ppo_repro.replay.columns import Stage
from ppo_repro.replay.recorded import Records
from ppo_repro.stages.advantages import compute_advantages
from ppo_repro.stages.faults import training_weights
from ppo_repro.stages.objective import Terms, make_terms
from ppo_repro.stages.rewards import rewards_from
from ppo_repro.stages.update import minibatches, policy_update, value_update, with_chosen
from ppo_repro.tasks.rewards import Judgement, weighted_scores

SECONDS = ("rollout", "forward", "update", "evaluation", "digests", "other")


def recorded_iteration(config: RunConfig, records: Records, coefficients: Coefficients) -> Iteration:
    """An iteration as it was recorded, with the losses that follow from it; `coefficients` are those in force."""
    rollout, forward = recorded.rollout_of(records), recorded.forward_of(records)
    advantages = recorded.advantages_of(records)
    terms = make_terms(config, coefficients, rollout, forward, advantages)
    return Iteration(
        records.iteration,
        recorded.evaluation_of(records),
        coefficients,
        rollout,
        forward,
        recorded.rewards_of(records),
        advantages,
        tuple(_updates(config, records, rollout.lengths, rollout.starts(), terms)),
        dict.fromkeys(SECONDS, 0.0),
    )


def again(config: RunConfig, item: Iteration, stages: Collection[Stage]) -> Iteration:
    """The iteration with rewards and advantages computed again, each from what was recorded before it."""
    rewards, advantages = item.rewards, item.advantages
    if "rewards" in stages:
        rewards = _rewards(config, item)
    if "advantages" in stages:
        advantages = compute_advantages(config, item.rollout, item.forward, item.rewards)
    return replace(item, rewards=rewards, advantages=advantages)


def _rewards(config: RunConfig, item: Iteration) -> Rewards:
    """From the values of the reward terms, which the task's verifier gave, and from the log-probs."""
    judged, finished = item.rewards, [reason == "stop" for reason in item.rollout.finish_reasons]
    scores = weighted_scores(config.reward, judged.score_parts, finished)
    judgement = Judgement(scores, [list(parts) for parts in judged.score_parts], judged.is_correct.tolist())
    return rewards_from(config, judgement, item.rollout, item.forward, item.coefficients.kl_coef)


@dataclass(frozen=True)
class _Step:
    """The recorded rows of one minibatch."""

    records: Records
    number: int  # row of the table `steps`
    rows: slice  # rows of the table `updates`
    tokens: Tensor  # [M] int64 index into the [N] fields
    weights: Tensor  # [M] float32
    place: tuple[int, int, int]  # iteration, epoch, minibatch

    def column(self, name: str) -> Tensor:
        return torch.from_numpy(self.records.array("updates", name)[self.rows])

    def has(self, name: str) -> bool:
        return bool(self.records.present("updates", name)[self.rows].all())

    def of_step(self, name: str) -> Any:
        return self.records.tables["steps"].column(name)[self.number].as_py()


def _updates(
    config: RunConfig, records: Records, lengths: Tensor, starts: Tensor, terms: Terms
) -> Iterator[MinibatchUpdate]:
    """The minibatches of the recorded steps, in the order in which the seed shuffles them."""
    steps = records.tables["steps"]
    epochs, numbers = records.values("steps", "epoch"), records.values("steps", "minibatch")
    reasons = records.values("sequences", "finish_reason")
    end, stopped = 0, False
    for row in range(steps.num_rows):
        epoch, number = epochs[row], numbers[row]
        shuffled = minibatches(len(lengths), config.ppo.minibatch_size, config.seed, records.iteration, epoch)
        sequences = shuffled[number]
        tokens = torch.cat([torch.arange(int(starts[s]), int(starts[s] + lengths[s])) for s in sequences])
        start, end = end, end + len(tokens)
        corrections = terms.policy.corrections
        counted = None if corrections is None or corrections.counted is None else corrections.counted[tokens]
        finish_reasons = [reasons[i] for i in sequences.tolist()]
        weights = training_weights(config, lengths[sequences], finish_reasons, counted)
        step = _Step(records, row, slice(start, end), tokens, weights, (records.iteration, epoch, number))
        if end > records.tables["updates"].num_rows:
            raise PromiseBroken(
                f"table updates, iteration {records.iteration}: has {records.tables['updates'].num_rows} rows; "
                f"the minibatches of the recorded steps have at least {end} tokens"
            )
        policy = None if stopped or epoch >= config.ppo.epochs else _policy(config, step, terms)
        value = _value(step, terms)
        if policy is not None and config.ppo.early_stop_kl is not None:
            stopped = policy.approx_kl > config.ppo.early_stop_kl
        digests = step.of_step("policy_digest"), step.of_step("value_digest")
        yield MinibatchUpdate(epoch, number, tokens, weights, policy, value, *digests)


def _policy(config: RunConfig, step: _Step, terms: Terms) -> PolicyUpdate | None:
    if not step.has("new_logprobs"):
        return None
    logprobs, entropies = step.column("new_logprobs"), step.column("new_entropies")
    kl_terms = terms.policy.estimated_kl_terms(step.tokens, logprobs)
    if isinstance(config.kl, KLInLoss) and config.kl.estimator == "exact":
        # over the vocabulary, which no record holds; where it was not recorded either, no loss is compared
        kl_terms = step.column("kl_terms") if step.has("kl_terms") else torch.zeros_like(logprobs)
    policy = with_chosen(terms.policy, step.tokens, logprobs, step.place)
    columns = policy.of(step.tokens, logprobs, entropies, kl_terms)
    report = _report(step, "grad_norm")
    return policy_update(report, columns, step.tokens, step.weights, policy)


def _value(step: _Step, terms: Terms) -> ValueUpdate | None:
    if terms.value is None or not step.has("new_values"):
        return None
    new_values = step.column("new_values")
    token_losses = terms.value.of(step.tokens, new_values)
    own = step.of_step("value_grad_norm") is not None
    report = _report(step, "value_grad_norm") if own else None
    return value_update(report, token_losses, new_values, step.tokens, step.weights, terms.value)


def _report(step: _Step, norm: str) -> StepReport:
    """The norm as recorded: gradients are in no record."""
    return StepReport(step.of_step(norm), ())
