"""What each condition of computing changes in the log-probs of the same tokens: alone, and added to all others."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from ppo_repro.checks.capture import batch_of, scored
from ppo_repro.checks.replay import Replay
from ppo_repro.models.networks import freeze
from ppo_repro.numerics import backend
from ppo_repro.rollout.engine import Completion, Request, Sampling


@dataclass(frozen=True)
class Path:
    """Conditions under which log-probs are computed; as they are here, it is the plain training forward."""

    cached_decode: bool = False
    one_at_a_time: bool = False  # sequences in a batch, or slots of the decoder
    left_padding: bool = False  # of a forward; the decoder has none
    two_threads: bool = False
    other_kernels: bool = False  # attention in plain products in native numerics, the specification in exact ones
    bfloat16_weights: bool = False  # rounded to bfloat16, computed with in the mode's own numerics


TOGGLES = tuple(Path.__dataclass_fields__)


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
def _computing(mode: str, path: Path) -> Iterator[None]:
    """The backend, threads and attention of a path; what was in use comes back."""
    usual = backend.active()
    backend.use("eager" if mode == "native" or path.other_kernels else usual, 2 if path.two_threads else 1)
    try:
        # stock transformers' own eager attention takes other masks, so the same call is given another kernel
        with sdpa_kernel(SDPBackend.MATH) if mode == "native" and path.other_kernels else nullcontext():
            yield
    finally:
        backend.use(usual, 1)


def _rounded(policy: PreTrainedModel) -> PreTrainedModel:
    coarse = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in coarse.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return freeze(coarse)


@torch.no_grad()
def _logprobs(
    policy: PreTrainedModel,
    mode: str,
    max_context: int,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sampling: Sampling,
    path: Path,
) -> Tensor:
    with _computing(mode, path):
        if path.cached_decode:
            slots = 1 if path.one_at_a_time else len(requests)
            return Replay(policy, mode, max_context, slots, completions).logprobs(requests, sampling)
        size, padding = 1 if path.one_at_a_time else len(requests), "left" if path.left_padding else "right"
        parts = []
        for start in range(0, len(requests), size):
            some = slice(start, start + size)
            batch = batch_of(requests[some], completions[some], padding)
            parts.append(scored(policy, mode, batch, completions[some], sampling.temperature))
        return torch.cat(parts)


def ladder(
    policy: PreTrainedModel,
    mode: str,
    max_context: int,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sampling: Sampling,
) -> list[Step]:
    """Each condition alone; all together; all but one. Compared with the plain training forward of the same tokens.

    `one`: change = mean|delta| of the condition alone. `but_one`: change = mean|delta| of all conditions together minus
    that of all others. Conditions are not additive: the two differ, and a change may be negative.
    """
    coarse = _rounded(policy)

    def found(path: Path) -> Tensor:
        model = coarse if path.bfloat16_weights else policy
        return _logprobs(model, mode, max_context, requests, completions, sampling, path)

    plain, every = found(Path()), Path(**dict.fromkeys(TOGGLES, True))
    steps = [_step(mode, "one", name, plain, found(replace(Path(), **{name: True}))) for name in TOGGLES]
    together = _step(mode, "but_one", "all", plain, found(every))
    steps.append(together)
    for name in TOGGLES:
        step = _step(mode, "but_one", name, plain, found(replace(every, **{name: False})))
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
