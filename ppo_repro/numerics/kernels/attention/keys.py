"""The keys and values of one span and head in the backward of attention, and their gradients.

The gradient of a key or value is an exact sum over queries: its terms are integers on one grid. Two float64s hold
the sum from one block of queries to the next, see `tiles`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.arithmetic.grid import HIGH_START, LEFT_BITS, RIGHT_BITS
from ppo_repro.numerics.kernels.attention.block import ONE, padded, panel_offset, quantise_row, transpose_rows
from ppo_repro.numerics.kernels.attention.tiles import COLUMNS, LANES, ROWS, add_rows
from ppo_repro.numerics.kernels.core.compile import kernel_part
from ppo_repro.numerics.kernels.core.scalar import (
    exponent64,
    magnitude_bits,
    magnitude_bits_64,
    pow2_64,
    round_to_f32_plus_zero,
)


class Saved(NamedTuple):
    """Inputs and results of the forward, and the gradient of its result: float32, flat."""

    q: np.ndarray  # [R L, H, D]
    k: np.ndarray  # [R L, Hk, D]
    v: np.ndarray  # [R L, Hk, D]
    out: np.ndarray  # [R L, H, D]
    grad: np.ndarray  # [R L, H, D]
    top: np.ndarray  # [Hk, R L H / Hk]
    total: np.ndarray  # [Hk, R L H / Hk] float64


class KeyGradients(NamedTuple):
    """Keys and values of one span and head, and their gradients' sums over queries; J is padded to whole panels."""

    keys: np.ndarray  # panels of grid numbers
    values: np.ndarray  # panels of grid numbers
    integers: np.ndarray  # [J, padded D] of the keys
    scales: np.ndarray  # [J] of the keys
    largest_dk: np.ndarray  # [J] bits of the largest magnitude of a term of a key's gradient
    largest_dv: np.ndarray
    up_dk: np.ndarray  # [J] 2^(bits - exponent) of the grid of those terms
    up_dv: np.ndarray
    dk_high: np.ndarray  # [J, padded D] sums: HIGH_START + dk = dk_high + dk_low
    dk_low: np.ndarray
    dv_high: np.ndarray
    dv_low: np.ndarray


@kernel_part
def make_keys(length, dim):  # type: ignore[no-untyped-def]
    """Memory for the keys of one span and head."""
    row, dp = padded(length, COLUMNS), padded(dim, LANES)
    return KeyGradients(
        np.empty(dim * row),
        np.empty(dim * row),
        np.empty(length * dp),
        np.empty(length),
        np.empty(row, np.int64),
        np.empty(row, np.int64),
        np.empty(row),
        np.empty(row),
        np.empty(row * dp),
        np.empty(row * dp),
        np.empty(row * dp),
        np.empty(row * dp),
    )


@kernel_part
def load_keys(saved, at, length, spec, keys):  # type: ignore[no-untyped-def]
    """Put keys and values on their grids, the first at offset `at`, and set the sums to zero."""
    dim, dp, stride = spec.dim, padded(spec.dim, LANES), spec.kv_heads * spec.dim
    key_rows, value_rows = np.zeros(LANES * dp), np.zeros(LANES * dp)
    for j in range(length):
        begin, lane = at + j * stride, j % LANES
        integers = keys.integers[j * dp : j * dp + dp]
        keys.scales[j] = pow2_64(quantise_row(saved.k[begin : begin + dim], ONE, RIGHT_BITS, integers) - RIGHT_BITS)
        value = value_rows[lane * dp : lane * dp + dp]
        value_scale = pow2_64(quantise_row(saved.v[begin : begin + dim], ONE, RIGHT_BITS, value) - RIGHT_BITS)
        for d in range(dim):
            key_rows[lane * dp + d] = integers[d] * keys.scales[j]
            value_rows[lane * dp + d] *= value_scale
        if lane == LANES - 1 or j == length - 1:
            transpose_rows(key_rows, dim, keys.keys, panel_offset(j - lane, dim))
            transpose_rows(value_rows, dim, keys.values, panel_offset(j - lane, dim))
    end = padded(length, COLUMNS)
    keys.largest_dk[:end] = 0
    keys.largest_dv[:end] = 0
    keys.dk_high[: end * dp] = HIGH_START
    keys.dk_low[: end * dp] = 0.0
    keys.dv_high[: end * dp] = HIGH_START
    keys.dv_low[: end * dp] = 0.0


@kernel_part
def raise_maxima(x, factor, largest):  # type: ignore[no-untyped-def]
    """largest[j] = max(largest[j], bits of |x[j] factor|)."""
    for j in range(x.size):
        largest[j] = max(largest[j], magnitude_bits_64(x[j] * factor))


@kernel_part
def set_grids(largest, up):  # type: ignore[no-untyped-def]
    """up[j] = 2^(LEFT_BITS - exponent) of the grid of each key's terms."""
    for j in range(largest.size):
        up[j] = pow2_64(LEFT_BITS - exponent64(largest[j]))


@kernel_part
def key_sums(block, count, base, width, dim, terms, scale, up, rows, high, low):  # type: ignore[no-untyped-def]
    """high[j] + low[j] += sum_i terms[i, j] rows[i]; first puts the terms on the keys' grids, in place."""
    dp, visible = padded(dim, LANES), block.tile_last.max() - base
    block_up = up[base : base + width]
    for i in range(count):
        row, factor = terms[i * width : i * width + width], scale[i]
        for j in range(width):
            row[j] = np.rint(row[j] * factor * block_up[j])
    for column in range(0, dp, COLUMNS):
        for j in range(0, visible, ROWS):
            columns, at = min(COLUMNS, dp - column), (base + j) * dp + column
            add_rows(terms, j, 1, width, rows, column, dp, high, low, at, dp, count, columns)


@kernel_part
def store_keys(high, low, up, at, length, spec, out):  # type: ignore[no-untyped-def]
    """Write the gradients of keys to flat [R L, Hk, D]. Returns the bits of the largest magnitude."""
    dim, dp, stride, worst = spec.dim, padded(spec.dim, LANES), spec.kv_heads * spec.dim, np.int32(0)
    for j in range(length):
        above, below = high[j * dp : j * dp + dim], low[j * dp : j * dp + dim]
        result, scale = out[at + j * stride : at + j * stride + dim], 1.0 / up[j]
        for d in range(dim):
            x = round_to_f32_plus_zero(((above[d] - HIGH_START) + below[d]) * scale)
            result[d] = x
            worst = max(worst, magnitude_bits(x))
    return worst
