"""Integer gradients that are sums over tokens without a product: biases and embeddings."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.core.rows import NOTHING


@kernel
def _add_rows(x, columns, exponents, grid, unit, ids, sums):  # type: ignore[no-untyped-def]
    for t in range(exponents.size):
        if exponents[t] == NOTHING or exponents[t] > grid:
            continue
        row = x[t * columns : t * columns + columns]
        start = ids[t] * columns if ids.size else 0
        target = sums[start : start + columns]
        for c in range(columns):
            target[c] += np.int64(np.rint(np.float64(row[c]) * unit))


def add_rows(x: np.ndarray, exponents: np.ndarray, grid: int, unit: float, ids: np.ndarray, sums: np.ndarray) -> None:
    """sums[ids[t]] += rne(x[t, :] unit), or sums += ... where `ids` is empty; x [T, N] float32, sums int64.

    A row of exponent above `grid` is left out: the step will be done again.
    """
    _add_rows(x.reshape(-1), x.shape[1], exponents, grid, unit, ids, sums.reshape(-1))
