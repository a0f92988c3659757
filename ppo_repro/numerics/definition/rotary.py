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


def rotary_tables(frequencies: Array, positions: int) -> tuple[Array, Array]:
    """Compute cos and sin of position x frequency in float64, rounded once; float32 [positions, D/2] each."""
    sine, cosine = sin_cos64(np.arange(positions)[:, None] * frequencies)
    return cosine.astype(F), sine.astype(F)
