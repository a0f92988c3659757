"""Requests for rollouts, MurmurHash3 by its definition, and random logits with seeds."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ppo_repro.rollout.engine import Request
from tests.support.models import ragged, seeded

MASK = 0xFFFFFFFF


def murmur3(data: bytes, seed: int = 0) -> int:
    """MurmurHash3_x86_32 over bytes whose length is a multiple of 4."""
    h = seed
    for (word,) in struct.iter_unpack("<I", data):
        k = word * 0xCC9E2D51 & MASK
        k = (k << 15 | k >> 17) & MASK
        h ^= k * 0x1B873593 & MASK
        h = (h << 13 | h >> 19) & MASK
        h = (h * 5 + 0xE6546B64) & MASK
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor & MASK
    return h ^ h >> 16


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
