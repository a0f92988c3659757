"""Coefficients that follow the measured KL between iterations, and factors of the learning rate by iteration."""

from __future__ import annotations

import math

import torch

from ppo_repro.numerics.elementwise import cos_sin

PENALTY_RANGE = 2.0**20  # factor by which an adaptive penalty may leave its first value, either way


def adaptive_kl_coef(kl_coef: float, kl: float, target_kl: float, sequences: int, horizon: int) -> float:
    """Return beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon). Ziegler et al., 2019.

    Args:
        kl_coef: beta of this iteration.
        kl: KL(policy || reference) per sequence in nats: summed over tokens, mean over sequences.
        target_kl: the desired KL per sequence, nats.
        sequences: n, the sequences of the iteration.
        horizon: an iteration changes beta by at most 20 % n / horizon. n / horizon counts as 1 at most, because more
            could make beta negative.
    """
    error = min(max(kl / target_kl - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * min(sequences / horizon, 1.0))


def adaptive_penalty_coef(penalty_coef: float, kl: float, target_kl: float, first: float) -> float:
    """Return beta / 2 if KL < target / 1.5, 2 beta if KL > 1.5 target, else beta. Schulman et al., 2017, section 4.

    Args:
        penalty_coef: beta of this iteration.
        kl: KL(old || new) per token in nats, over the last epoch, before each of its steps.
        target_kl: the desired KL per token, nats.
        first: beta of the first iteration. beta stays within a factor of 2^20 of it, because a beta of 0 or infinity
            could never change again.
    """
    if kl < target_kl / 1.5:
        penalty_coef /= 2.0
    elif kl > 1.5 * target_kl:
        penalty_coef *= 2.0
    return min(max(penalty_coef, first / PENALTY_RANGE), first * PENALTY_RANGE)


def adaptive_clip_range(clip_range: float, kl: float, target_kl: float, smallest: float, largest: float) -> float:
    """Return eps / 2 if KL > 1.5 target, 2 eps if KL < target / 1.5, else eps; clamped to [smallest, largest].

    Without the bounds, repeated doubling would make 1 - eps negative, so that no ratio is clipped from below.

    Args:
        clip_range: eps of this iteration.
        kl: KL(old || new) per token in nats, over the last epoch, before each of its steps.
        target_kl: the desired KL per token, nats.
        smallest: lower bound of eps.
        largest: upper bound of eps.
    """
    if kl > 1.5 * target_kl:
        clip_range *= 0.5
    elif kl < target_kl / 1.5:
        clip_range *= 2.0
    return min(max(clip_range, smallest), largest)


def rate_factor(schedule: str, iteration: int, iterations: int, warmup_iterations: int) -> float:
    """Return the factor of the learning rate: a linear warm-up, then the schedule.

    Warm-up over w iterations: (i + 1) / (w + 1). Then with u = (i - w) / (iterations - w): constant 1, linear 1 - u,
    cosine (1 + cos(pi u)) / 2. `elementwise.cos_sin` computes the cosine, because the C library's differs by machine.

    Args:
        schedule: constant, linear or cosine.
        iteration: i, from 0.
        warmup_iterations: w.
    """
    if iteration < warmup_iterations:
        return (iteration + 1) / (warmup_iterations + 1)
    u = (iteration - warmup_iterations) / (iterations - warmup_iterations)
    if schedule == "linear":
        return 1.0 - u
    if schedule == "cosine":
        return (1.0 + cos_sin(torch.tensor([u * math.pi], dtype=torch.float64))[0].item()) / 2.0
    return 1.0
