"""Settings of the sampler, and what it makes of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ppo_repro.rollout.engine import Sampling
from ppo_repro.rollout.sampler import sample
from tests.support.kernels import values

CUTS = ((0, 1.0), (0, 1.0), (5, 1.0), (0, 0.8), (7, 0.9), (1, 1.0))


def samples(
    seed: int, n: int, v: int, kind: str, cuts: tuple[int, float], temperature: float, greedy: bool
) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(values(kind, (n, v), rng))
    keys = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, n))
    positions = torch.from_numpy(rng.integers(0, 2**31, n))
    return list(vars(sample(logits, keys, positions, Sampling(temperature, *cuts, 1, greedy), "exact")).values())
