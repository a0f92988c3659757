"""Learning-rate factors by iteration."""

from __future__ import annotations

import math

import torch

from ppo_repro.numerics.elementwise import cos_sin


def rate_factor(schedule: str, iteration: int, iterations: int, warmup_iterations: int) -> float:
    """Factor on the learning rate in `iteration` (from 0): a linear warm-up, then the schedule.

    Warm-up over w iterations: (i + 1) / (w + 1). Then with u = (i - w) / (iterations - w): constant 1, linear 1 - u,
    cosine (1 + cos(pi u)) / 2. The cosine is `elementwise.cos_sin`, because the C library's differs between machines.
    """
    if iteration < warmup_iterations:
        return (iteration + 1) / (warmup_iterations + 1)
    u = (iteration - warmup_iterations) / (iterations - warmup_iterations)
    if schedule == "linear":
        return 1.0 - u
    if schedule == "cosine":
        return (1.0 + cos_sin(torch.tensor([u * math.pi], dtype=torch.float64))[0].item()) / 2.0
    return 1.0
