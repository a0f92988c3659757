"""How much each condition of the computation changes the log-probs of the same tokens: alone, and added to the rest."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from ppo_repro.checks.capture import Subject, batch_of, scored
from ppo_repro.checks.replay import Replay
from ppo_repro.models.networks import freeze, policy_logits
from ppo_repro.numerics import library


@dataclass(frozen=True)
class Conditions:
    """Conditions under which log-probs are computed. All False is the plain training forward."""

    cached_decode: bool = False
    one_at_a_time: bool = False  # one sequence per batch, or one slot in the decoder
    two_threads: bool = False
    bfloat16_weights: bool = False  # weights rounded to bfloat16; computed in the numerics of the mode
    left_padding: bool = False  # of a forward pass; the decoder has no padding
    other_kernels: bool = False  # attention without fused kernels


ONLY_NATIVE = ("left_padding", "other_kernels")


def toggles(mode: str) -> tuple[str, ...]:
    """The conditions that a mode has."""
    return tuple(f for f in Conditions.__dataclass_fields__ if mode == "native" or f not in ONLY_NATIVE)


@dataclass(frozen=True)
class Step:
    """One row of `mismatch_ladder`."""

    mode: str
    way: str
    toggle: str
    tokens: int
    frac_unequal: float
    mean_abs: float
    max_abs: float
    k3: float
    change: float


@contextmanager
def _under(conditions: Conditions) -> Iterator[None]:
    """Use the threads and attention kernel of `conditions` inside the block."""
    library.use_threads(2 if conditions.two_threads else 1)
    try:
        # transformers' own eager attention expects other masks, so the same call gets another kernel
        with sdpa_kernel(SDPBackend.MATH) if conditions.other_kernels else nullcontext():
            yield
    finally:
        library.use_threads(1)


def _rounded(policy: PreTrainedModel) -> PreTrainedModel:
    coarse = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in coarse.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return freeze(coarse)


@torch.no_grad()
def _logprobs(s: Subject, policy: PreTrainedModel, conditions: Conditions) -> Tensor:
    count = len(s.requests)
    size = 1 if conditions.one_at_a_time else count
    with _under(conditions):
        if conditions.cached_decode:
            return Replay(policy, s.mode, s.max_context, size, s.completions).logprobs(s.requests, s.sampling)
        padding = "left" if conditions.left_padding else "right"
        by_batch = []
        for start in range(0, count, size):
            requests, completions = s.requests[start : start + size], s.completions[start : start + size]
            logits = policy_logits(policy, batch_of(requests, completions, padding))
            by_batch.append(scored(logits, s.mode, completions, s.sampling.temperature))
        return torch.cat(by_batch)


def ladder(s: Subject) -> list[Step]:
    """Each condition alone; all together; all but one. Compared with the plain training forward of the same tokens.

    `one`: change = mean|delta| of the condition alone. `but_one`: change = mean|delta| of all conditions together minus
    that of all others. Conditions are not additive: the two differ, and a change may be negative.
    """
    coarse, names = _rounded(s.policy), toggles(s.mode)

    def logprobs(conditions: Conditions) -> Tensor:
        return _logprobs(s, coarse if conditions.bfloat16_weights else s.policy, conditions)

    plain, every = logprobs(Conditions()), Conditions(**dict.fromkeys(names, True))
    steps = [_step(s.mode, "one", name, plain, logprobs(replace(Conditions(), **{name: True}))) for name in names]
    together = _step(s.mode, "but_one", "all", plain, logprobs(every))
    steps.append(together)
    for name in names:
        step = _step(s.mode, "but_one", name, plain, logprobs(replace(every, **{name: False})))
        steps.append(replace(step, change=together.mean_abs - step.mean_abs))
    return steps


def _step(mode: str, way: str, toggle: str, plain: Tensor, other: Tensor) -> Step:
    delta = other.to(torch.float64) - plain.to(torch.float64)
    unequal = other.view(torch.int32) != plain.view(torch.int32)
    mean_abs = float(delta.abs().mean())
    return Step(
        mode=mode,
        way=way,
        toggle=toggle,
        tokens=len(delta),
        frac_unequal=float(unequal.to(torch.float64).mean()),
        mean_abs=mean_abs,
        max_abs=float(delta.abs().max()),
        k3=float((torch.expm1(delta) - delta).mean()),
        change=mean_abs,
    )
