"""Compute rule 3, the sum of a row: 16 lanes in float64, joined by halves.

Norms, softmax and dot products use rule 3.
"""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, D, F

LANES = 16


def row_sum(a: Array, b: Array | None = None) -> Array:
    """Compute rule 3: sum_i a[.., i] b[.., i], or without b sum_i a[.., i]; float64 [..], not yet rounded.

    Lane l adds i = l, l + 16, .. in order. Then the upper half of the lanes is added to the lower half until one is
    left. Kernels: `dot_rows`, `sum_row`, `join_lanes`.
    """
    terms = a.astype(D) if b is None else a.astype(D) * b.astype(D)
    lanes = np.zeros((*terms.shape[:-1], LANES), D)
    for start in range(0, terms.shape[-1], LANES):
        part = terms[..., start : start + LANES]
        lanes[..., : part.shape[-1]] += part
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def row_mean(a: Array, b: Array | None = None) -> Array:
    """Divide `row_sum` by the number of terms in float64 and round once; float32 [.., 1]."""
    return (row_sum(a, b) / a.shape[-1]).astype(F)[..., None]
