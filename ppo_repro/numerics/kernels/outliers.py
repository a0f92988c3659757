"""Products with outliers, the numbers that no grid holds; see `arithmetic.contraction`.

They are few. A product of two float32 is exact in float64; their sum goes by rising column, so it has one order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.kernels.core.compile import kernel, kernel_part
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.rows import grid_exponent
from ppo_repro.numerics.kernels.core.scalar import pow2_32

_AT_ONCE = 4096  # columns whose weights are gathered at a time


class Outliers(NamedTuple):
    """The columns of outliers, rising within each row: those of row r are columns[starts[r]:starts[r + 1]]."""

    starts: np.ndarray  # int64 [R + 1]
    columns: np.ndarray  # int64

    @property
    def any(self) -> bool:
        """Whether there are some."""
        return self.columns.size > 0


NONE = Outliers(np.zeros(1, np.int64), np.empty(0, np.int64))


@kernel
def find_rows(x, row_step, step, terms, rows, room, gap, most, starts, columns):  # type: ignore[no-untyped-def]
    count, row = 0, np.empty(terms, np.float32)
    for r in range(rows.size):
        starts[r] = count
        if not rows[r]:
            continue
        for k in range(terms):
            row[k] = x[r * row_step + k * step]
        e, _ = grid_exponent(row, room, gap, most)
        limit = pow2_32(e)
        for k in range(terms):
            if np.abs(row[k] * room) >= limit:
                columns[count] = k
                count += 1
    starts[rows.size] = count
    return count


def find(x: np.ndarray, along_rows: bool, rows: np.ndarray, room: float, gap: int, most: int) -> Outliers:
    """The outliers of the rows of x, or of its columns, for which `rows` [R] is true; x float32, C-contiguous.

    `most` bounds the outliers of a row; see `rows.grid_exponent` for the law.
    """
    if not np.count_nonzero(rows):
        return NONE
    row_step, step, terms = (x.shape[1], 1, x.shape[1]) if along_rows else (1, x.shape[1], x.shape[0])
    starts, columns = np.zeros(rows.size + 1, np.int64), np.empty(int(rows.sum()) * most, np.int64)
    count = find_rows(x.reshape(-1), row_step, step, terms, rows, np.float32(room), gap, most, starts, columns)
    return Outliers(starts, columns[:count].copy())


@kernel_part
def _gather(w, row_step, step, wanted, first, last, out):  # type: ignore[no-untyped-def]
    """out[i, n] = w[first + n, wanted[i]], flat."""
    for n in range(last - first):
        for i in range(wanted.size):
            out[i * (last - first) + n] = w[(first + n) * row_step + wanted[i] * step]


@kernel_part
def _is_in(columns, k):  # type: ignore[no-untyped-def]
    found = False
    for i in range(columns.size):
        found |= columns[i] == k
    return found


@kernel
def add_rows(x, terms, own, wanted, w, row_step, step, others, first, last, columns, y):  # type: ignore[no-untyped-def]
    """Columns first..last-1 of `add_products`, flat."""
    count = last - first
    gathered, total, at = np.empty(wanted.size * count, np.float32), np.zeros(count), np.zeros(terms, np.int64)
    _gather(w, row_step, step, wanted, first, last, gathered)
    for i in range(wanted.size):
        at[wanted[i]] = i * count
    for m in range(y.size // columns):
        ks = own.columns[own.starts[m] : own.starts[m + 1]] if own.columns.size else own.columns
        if ks.size == 0 and others.columns.size == 0:
            continue
        total[:] = 0.0
        for i in range(ks.size):
            value, row = np.float64(x[m * terms + ks[i]]), gathered[at[ks[i]] : at[ks[i]] + count]
            for n in range(count):
                total[n] += value * np.float64(row[n])
        if others.columns.size:
            for n in range(count):
                for i in range(others.starts[first + n], others.starts[first + n + 1]):
                    k = others.columns[i]
                    if not _is_in(ks, k):
                        total[n] += np.float64(x[m * terms + k]) * np.float64(w[(first + n) * row_step + k * step])
        out = y[m * columns + first : m * columns + last]
        for n in range(count):
            out[n] = np.float32(np.float64(out[n]) + total[n])


def add_products(
    x: np.ndarray, x_outliers: Outliers, w: np.ndarray, w_outliers: Outliers, y: np.ndarray, dim: int
) -> None:
    """y[m, n] = fl32(y[m, n] + sum of x[m, k] w[n, k] over the outliers of row m, then over the others of row n).

    x [M, K], y [M, N], w [N, K] for `dim` 1 or [K, N] for 0; float32, C-contiguous.
    """
    if not (x_outliers.any or w_outliers.any):
        return
    columns, terms = y.shape[1], x.shape[1]
    row_step, step = (terms, 1) if dim == 1 else (1, columns)
    wanted = np.unique(x_outliers.columns)
    flat, weights, out = x.reshape(-1), w.reshape(-1), y.reshape(-1)

    def run(first: int, last: int) -> None:
        for start in range(first, last, _AT_ONCE):
            stop = min(start + _AT_ONCE, last)
            add_rows(flat, terms, x_outliers, wanted, weights, row_step, step, w_outliers, start, stop, columns, out)

    in_parts(run, columns, 5.0 * wanted.size + 0.2 * len(y))
