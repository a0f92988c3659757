"""Faults by construction: one bit of one number of a run is another one.

`python -m tests.support.unequal ARGUMENTS` is `ppo-repro ARGUMENTS` with a sampler that differs in iteration 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_repro import loop
from ppo_repro.buffers import MinibatchUpdate
from ppo_repro.models.state import Digests
from ppo_repro.sampler import Completion, Request, Sampling
from ppo_repro.sampling.built_in import BuiltInSampler


def flipped(values: Tensor, row: int) -> Tensor:
    """A copy with the lowest bit of one float32 changed."""
    bits = values.clone().view(torch.int32)
    bits[row] ^= 1
    return bits.view(torch.float32)


def sampler_differs(patch: pytest.MonkeyPatch, iteration: int, response: int, token: int) -> None:
    """The built-in engine reports another log-prob for one token, from `iteration` on in every rollout."""
    real, rollouts = BuiltInSampler.generate, 0

    def generate(engine: BuiltInSampler, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        nonlocal rollouts
        completions = real(engine, requests, sampling)
        if sampling.greedy:
            return completions
        rollouts += 1
        if rollouts > iteration:
            other = completions[response]
            completions[response] = replace(other, logprobs=flipped(other.logprobs, token))
        return completions

    patch.setattr(BuiltInSampler, "generate", generate)


def first_step_differs(patch: pytest.MonkeyPatch, change: Callable[[MinibatchUpdate], MinibatchUpdate]) -> None:
    """The first minibatch of every iteration is what `change` makes of it."""
    real = loop.update

    def update(*arguments: Any) -> Iterator[tuple[MinibatchUpdate, Digests]]:
        steps = real(*arguments)
        step, digests = next(steps)
        yield change(step), digests
        yield from steps

    patch.setattr(loop, "update", update)


def other_ratio(step: MinibatchUpdate) -> MinibatchUpdate:
    assert step.policy is not None
    return replace(step, policy=replace(step.policy, ratios=flipped(step.policy.ratios, 0)))


def other_value(step: MinibatchUpdate) -> MinibatchUpdate:
    assert step.value is not None
    return replace(step, value=replace(step.value, new_values=flipped(step.value.new_values, 0)))


if __name__ == "__main__":
    from ppo_repro.commands.cli import main

    with pytest.MonkeyPatch.context() as context:
        sampler_differs(context, 1, 0, 0)
        main()
