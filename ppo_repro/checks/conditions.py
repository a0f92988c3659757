"""How much each condition of the computation changes the log-probs of the same tokens: alone, and added to the rest."""

from __future__ import annotations

import copy
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from ppo_repro.checks.capture import Replay, Subject, batch_of, scored
from ppo_repro.models.networks import freeze, policy_logits
from ppo_repro.numerics import library

DETERMINISTIC = ("cached_decode", "one_at_a_time", "two_threads", "bfloat16_weights")
TOGGLES = {"deterministic": DETERMINISTIC, "native": (*DETERMINISTIC, "left_padding", "other_kernels")}
"""Conditions of each mode. one_at_a_time: one sequence per batch, or one slot in the decoder. bfloat16_weights: rounded
weights, computed in the numerics of the mode. left_padding: of a forward pass. other_kernels: no fused attention.
"""


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


def _rounded(policy: PreTrainedModel) -> PreTrainedModel:
    coarse = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in coarse.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return freeze(coarse)


@torch.no_grad()
def _logprobs(s: Subject, policy: PreTrainedModel, conditions: Collection[str]) -> Tensor:
    count = len(s.requests)
    size = 1 if "one_at_a_time" in conditions else count
    if "cached_decode" in conditions:
        return Replay(policy, s.mode, s.max_context, size, s.completions).logprobs(s.requests, s.sampling)
    padding = "left" if "left_padding" in conditions else "right"
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
    coarse, names = _rounded(s.policy), TOGGLES[s.mode]

    def logprobs(conditions: Collection[str]) -> Tensor:
        # transformers' own eager attention expects other masks, so the same call gets another kernel
        kernel = sdpa_kernel(SDPBackend.MATH) if "other_kernels" in conditions else nullcontext()
        library.use_threads(2 if "two_threads" in conditions else 1, torch_computes=True)
        try:
            with kernel:
                return _logprobs(s, coarse if "bfloat16_weights" in conditions else s.policy, conditions)
        finally:
            library.use_threads(1)

    plain = logprobs(())
    steps = [_step(s.mode, "one", name, plain, logprobs((name,))) for name in names]
    together = _step(s.mode, "but_one", "all", plain, logprobs(names))
    steps.append(together)
    for name in names:
        step = _step(s.mode, "but_one", name, plain, logprobs([other for other in names if other != name]))
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
