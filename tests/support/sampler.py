"""Requests for rollouts, and random logits with seeds."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.sampler import Request
from tests.support.models import ragged, seeded


def drawn_case(n: int, v: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = seeded(seed)
    logits = torch.randn(n, v, generator=generator) * 2.0
    seeds = torch.randint(-(2**62), 2**62, (n,), generator=generator)
    return logits, seeds, torch.randint(0, 4096, (n,), generator=generator)


STOPS = frozenset({3, 17, 40, 41, 42, 60})


def requests_of(count: int, seed: int, longest: int = 14) -> list[Request]:
    prompts, _ = ragged(count, seed, prompt=longest)
    seeds = torch.randint(0, 2**62, (count,), generator=seeded(seed + 1)).tolist()
    return [Request(tuple(p), s) for p, s in zip(prompts, seeds, strict=True)]
