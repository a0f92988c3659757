"""Requests for rollouts, and the tokens that end them."""

from __future__ import annotations

import torch

from ppo_repro.rollout.engine import Request
from tests.support.models import (
    ragged,
    seeded,
)

STOPS = frozenset({3, 17, 40, 41, 42, 60})


def requests_of(count: int, seed: int, longest: int = 14) -> list[Request]:
    prompts, _ = ragged(count, seed, prompt=longest)
    seeds = torch.randint(0, 2**62, (count,), generator=seeded(seed + 1)).tolist()
    return [Request(tuple(p), s) for p, s in zip(prompts, seeds, strict=True)]
