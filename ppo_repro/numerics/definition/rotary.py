"""Compute rule 5 for rotary positions: frequencies, and tables of cosine and sine. Su et al., 2021."""

from __future__ import annotations

import math

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, D, F, exp64, log64, sin_cos64


def frequencies(theta: float, rotating: int) -> Array:
    """Compute theta^(-2i/D), float64 [D/2], for a head of which D elements rotate; theta is rounded to float32."""
    return 1.0 / exp64(np.arange(0, rotating, 2, dtype=D) / rotating * log64(np.asarray(theta, F)))


def llama3_frequencies(plain: Array, factor: float, low: float, high: float, context: int) -> Array:
    """Compute Llama 3's frequencies: those with few turns in the original context are divided by a factor.

    Args:
        plain: the frequencies without scaling, float64 [D/2].
        factor: divides frequencies with at most `low` turns; frequencies with at least `high` turns stay.
        low: see `factor`.
        high: see `factor`.
        context: positions of the original context.
    """
    turns = context / (2 * math.pi / plain)
    stays = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * stays + (plain / factor) * (1.0 - stays)


def _log(x: float) -> float:
    return float(log64(np.asarray(x, D)))


def yarn_frequencies(
    plain: Array, theta: float, factor: float, fast: float, slow: float, context: int, truncate: bool = True
) -> Array:
    """Compute YaRN's frequencies: from frequencies that stay to frequencies divided by a factor. Peng et al., 2023.

    Args:
        plain: the frequencies without scaling, float64 [D/2].
        theta: their base; rounded to float32.
        factor: divides frequencies.
        fast: frequencies with more turns in the original context stay.
        slow: frequencies with fewer turns are divided.
        context: positions of the original context.
        truncate: whether the two ends are whole indices.
    """
    dim, log_theta = 2 * len(plain), float(log64(np.asarray(theta, F)))
    low, high = (dim * _log(context / (turns * 2 * math.pi)) / (2 * log_theta) for turns in (fast, slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    divided = np.clip((np.arange(len(plain)) - low) / ((high - low) or 0.001), 0.0, 1.0)
    return (plain / factor) * divided + plain * (1.0 - divided)


def yarn_attention_factor(factor: float) -> float:
    """Compute 0.1 ln factor + 1, which multiplies cosines and sines; factor is above 1."""
    return 0.1 * _log(factor) + 1.0


def longrope_attention_factor(factor: float, context: int) -> float:
    """Compute sqrt(1 + ln factor / ln context), which multiplies cosines and sines. Ding et al., 2024.

    Args:
        factor: the longest context divided by the original one, above 1.
        context: positions of the original context.
    """
    return math.sqrt(1 + _log(factor) / _log(context))


def rotary_tables(frequencies: Array, positions: int, factor: float = 1.0) -> tuple[Array, Array]:
    """Compute cos and sin of position x frequency, times a factor, in float64; float32 [positions, D/2] each."""
    sine, cosine = sin_cos64(np.arange(positions)[:, None] * frequencies)
    return (cosine * factor).astype(F), (sine * factor).astype(F)
