"""Train a new policy by supervision until it gives some right answers, so that PPO has a signal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_repro.base.mode import Mode
from ppo_repro.base.processes import SLOTS
from ppo_repro.base.seeding import permutation
from ppo_repro.buffers import WarmStartStep
from ppo_repro.config.model import TinyModel
from ppo_repro.config.numerics import NumericsConfig
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.sequences import slots_of
from ppo_repro.numerics.sums import mean_of
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.sampler import Request, Sampling
from ppo_repro.sampling.built_in import BuiltInSampler
from ppo_repro.tasks.problems import Problem

WARM_UP, COOL_DOWN = 30, 20  # steps over which the learning rate rises at the start and falls at the end
CHECK_EVERY, CHECK_PROMPTS = 10, 256

Pair = tuple[list[int], list[int]]  # prompt tokens, answer tokens with the end token


def _cross_entropy_step(
    policy: PreTrainedModel, optimizer: Optimizer, minibatch: Sequence[Pair], mode: Mode
) -> tuple[float, float]:
    """Take one step on -log p(answer token), token mean; return the loss before the step and the gradient norm."""
    slots = slots_of(range(len(minibatch)), len(minibatch), SLOTS)
    batch = lay_out([p for p, _ in minibatch], [a for _, a in minibatch], slots=slots).with_sums(optimizer.sink)
    losses: list[torch.Tensor] = []

    def backward() -> None:
        logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, mode)
        losses.append(-logprobs.detach())
        torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / len(logprobs)))

    grad_norm = optimizer.step(backward)
    return mean_of(losses[0]), grad_norm


def _accuracy(sampler: BuiltInSampler, pairs: Sequence[Pair]) -> float:
    """Return the share of prompts whose greedy response equals the answer, token for token."""
    longest = max(len(answer) for _, answer in pairs)
    requests = [Request(tuple(prompt), 0) for prompt, _ in pairs]
    completions = sampler.generate(requests, Sampling(1.0, 0, 1.0, longest, greedy=True))
    hits = [list(c.response_ids) == answer for c, (_, answer) in zip(completions, pairs, strict=True)]
    return sum(hits) / len(hits)


def _minibatches(pairs: Sequence[Pair], size: int, seed: int) -> Iterator[tuple[int, list[Pair]]]:
    """Yield epoch and minibatch without end: `size` pairs of a random order. An epoch's last pairs may be left out."""
    for epoch in count():
        order = permutation(len(pairs), "warm start", seed, epoch)
        for k in range(0, len(pairs) - size + 1, size):
            yield epoch, [pairs[i] for i in order[k : k + size]]


def _pairs(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase) -> list[Pair]:
    prompts = tokenizer([p.prompt for p in problems])["input_ids"]
    answers = tokenizer([p.solution for p in problems])["input_ids"]
    return [(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in zip(prompts, answers, strict=True)]


def warm_start(
    source: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    config: TinyModel,
    numerics: NumericsConfig,
    seed: int,
    progress: Callable[[int, int, str], None],
) -> tuple[WarmStartStep, ...]:
    """Train `source` in place to give the answers; return the record of each step.

    The loss is cross-entropy on answer and end token. The optimizer is AdamW. The learning rate rises over 30 steps,
    stays constant until the greedy accuracy on 256 training prompts reaches `warm_start_accuracy`, then falls to zero
    over 20.

    Args:
        source: a float32 model.
        progress: called with step, last step and loss as text after each step.
    """
    policy = make_policy(source, numerics.mode, numerics.max_context, numerics.precision)
    settings = AdamWSettings(learning_rate=config.warm_start_learning_rate, beta2=0.98, weight_decay=0.01)
    optimizer = Optimizer(policy, settings, numerics.mode)
    pairs, stop = _pairs(problems, tokenizer), frozenset([tokenizer.eos_token_id])
    sampler = BuiltInSampler(policy, stop, numerics.mode, numerics.max_context, CHECK_PROMPTS, 0)
    minibatches = _minibatches(pairs, min(config.warm_start_batch_size, len(pairs)), seed)
    steps: list[WarmStartStep] = []
    step, end = 0, config.warm_start_steps
    while step < end:
        epoch, minibatch = next(minibatches)
        scale = min(1.0, (step + 1) / WARM_UP, (end - step) / COOL_DOWN)
        optimizer.settings = replace(settings, learning_rate=settings.learning_rate * scale)
        loss, grad_norm = _cross_entropy_step(policy, optimizer, minibatch, numerics.mode)
        step += 1
        due = step % CHECK_EVERY == 0 and step + COOL_DOWN < end
        accuracy = _accuracy(sampler, pairs[:CHECK_PROMPTS]) if due else None
        if accuracy is not None and accuracy >= config.warm_start_accuracy:
            end = step + COOL_DOWN
        steps.append(
            WarmStartStep(
                epoch=epoch,
                examples=len(minibatch),
                tokens=sum(len(answer) for _, answer in minibatch),
                loss=loss,
                learning_rate=optimizer.settings.learning_rate,
                grad_norm=grad_norm,
                accuracy=accuracy,
            )
        )
        progress(step, end, f"loss {loss:.3f} nats/token")
    source.load_state_dict(policy.state_dict())
    return tuple(steps)
