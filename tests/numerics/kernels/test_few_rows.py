"""Products of a few rows have the bits of whole numbers, and attention of one token those of attention over a cache."""

from __future__ import annotations

import numpy as np
import pytest

from ppo_repro.numerics.arithmetic.contraction import most_outliers
from ppo_repro.numerics.arithmetic.grid import EXACT_TERMS, INPUT_BITS, ROOM, WEIGHT_BITS
from ppo_repro.numerics.kernels.attention import decoding
from ppo_repro.numerics.kernels.attention.block import Spec
from ppo_repro.numerics.kernels.attention.forward import forward_cached, store
from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.float64 import few_rows
from ppo_repro.numerics.kernels.float64.tiles import COLUMNS, ROWS

# parts of kernels, which Python cannot call, as kernels
PARTS = few_rows.multiply_rows, few_rows.put_on_grid, few_rows.add_outliers, decoding.forward_single
multiply_rows, put_on_grid, add_outliers, forward_single = (kernel(part.py_func) for part in PARTS)


def multiplied(integers: np.ndarray, scales: np.ndarray, weights: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """`multiply_rows` of integers [R, K] and [N, K]; a column's scale is 2^-(column % 5)."""
    (rows, terms), columns = integers.shape, len(weights)
    count = -(-columns // COLUMNS)
    padded = np.zeros((count * COLUMNS, terms), np.int32)
    padded[:columns] = weights
    panels = np.ascontiguousarray(padded.reshape(count, COLUMNS, terms).transpose(0, 2, 1))
    column_scales, biases = np.zeros(count * COLUMNS), np.zeros(count * COLUMNS, np.float32)
    column_scales[:columns], biases[:columns] = np.ldexp(1.0, -(np.arange(columns) % 5)), bias
    inputs, all_scales = np.zeros((-(-rows // ROWS) * ROWS, terms + few_rows.PADDING)), np.ones(-(-rows // ROWS) * ROWS)
    inputs[:rows, :terms], all_scales[:rows] = integers, scales
    y = np.full(rows * columns + 1, 7.0, np.float32)  # the last number is not to be touched
    addresses = panels.ctypes.data, column_scales.ctypes.data, biases.ctypes.data
    multiply_rows(inputs.reshape(-1), all_scales, rows, terms, *addresses, columns, y[:-1])
    assert y[-1] == 7.0
    return y[:-1].reshape(rows, columns)


def by_integers(integers: np.ndarray, scales: np.ndarray, weights: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The same in Python's integers: one rounding to float64, one to float32, then the bias."""
    y = np.empty((len(integers), len(weights)), np.float32)
    for m, row in enumerate(integers.tolist()):
        for n, column in enumerate(weights.tolist()):
            total = sum(int(a) * b for a, b in zip(row, column, strict=True))
            y[m, n] = np.float32(float(total) * float(scales[m]) * 2.0 ** -(n % 5)) + np.float32(0.0) + bias[n]
    return y


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 19])
def test_products_are_those_of_integers(rows: int) -> None:
    generator = np.random.default_rng(rows)
    terms, columns = int(generator.integers(1, 70)), int(generator.integers(1, 60))
    integers = generator.integers(-(2**INPUT_BITS), 2**INPUT_BITS + 1, (rows, terms)).astype(float)
    weights = generator.integers(-(2**22), 2**22, (columns, terms))
    arguments = integers, np.ldexp(1.0, -generator.integers(0, 60, rows)), weights, generator.normal(size=columns)
    arguments = (*arguments[:3], arguments[3].astype(np.float32))
    assert multiplied(*arguments).tobytes() == by_integers(*arguments).tobytes()


@pytest.mark.parametrize("signs", ["all the largest", "that cancel"])
def test_products_of_the_largest_integers_lose_nothing(signs: str) -> None:
    """Sums pass 2^53; where the large terms cancel, what float64 loses on the way decides the result."""
    half, largest = 2 * EXACT_TERMS + 5, int(2**WEIGHT_BITS / ROOM)
    integers = np.full((1, 2 * half + 1), float(2**INPUT_BITS - 1))
    weights = np.full((1, 2 * half + 1), largest)
    integers[0, half] = weights[0, half] = 1
    if signs == "that cancel":
        weights[0, half + 1 :] *= -1
    arguments = integers, np.ones(1), weights, np.zeros(1, np.float32)
    result = multiplied(*arguments)
    assert result.tobytes() == by_integers(*arguments).tobytes()
    if signs == "that cancel":
        assert result[0, 0] == 1.0 and (integers * weights).cumsum()[-1] != 1.0  # in float64, term by term


def test_rows_on_their_grids_and_products_with_outliers() -> None:
    generator = np.random.default_rng(3)
    rows, terms, columns = 5, 40, 30
    x, w = generator.normal(size=(rows, terms)).astype(np.float32), generator.normal(size=(columns, terms))
    w = w.astype(np.float32)
    x[1, 7] = 1e4
    inputs, scales, limits = np.zeros((8, terms + few_rows.PADDING)), np.ones(8), np.empty(rows, np.float32)
    ended = put_on_grid(x.reshape(-1), terms, most_outliers(terms), inputs.reshape(-1), scales, limits)
    assert ended == 2 and np.isfinite(limits).tolist() == [False, True, False, False, False]
    outliers = np.abs(x) >= limits[:, None]
    assert outliers[1, 7] and not inputs[:rows, :terms][outliers].any() and not inputs[:, terms:].any()
    back = np.where(outliers, x, inputs[:rows, :terms] * scales[:rows, None])
    assert np.abs(back - x).max() <= 2.0**-27 * 4  # half a unit of a grid that ends at 4
    starts, others = np.zeros(columns + 1, np.int64), np.array([3, 7], np.int64)
    starts[3:] = 2  # of row 2 of w alone
    y = generator.normal(size=(rows, columns)).astype(np.float32)
    expected = y.copy()
    add_outliers(x.reshape(-1), terms, limits, w.reshape(-1), starts, others, y.reshape(-1), columns)
    for m in range(rows):
        for n in range(columns):
            total = 0.0
            for k in [*np.flatnonzero(outliers[m]), *(k for k in (3, 7) if n == 2 and not outliers[m, k])]:
                total += float(x[m, k]) * float(w[n, k])
            expected[m, n] = np.float32(float(expected[m, n]) + total)
    assert y.tobytes() == expected.tobytes()
    x[4, 4] = np.nan
    assert put_on_grid(x.reshape(-1), terms, 4, inputs.reshape(-1), scales, limits) == 0


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 1, 64), (4, 2, 40), (6, 2, 24), (5, 1, 72)])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_of_one_token_has_the_bits_of_attention_over_a_cache(
    shape: tuple[int, int, int], window: int | None
) -> None:
    heads, kv_heads, dim = shape
    generator, rows, context = np.random.default_rng(dim), 6, 70
    spec, padded = Spec(heads, kv_heads, dim, dim**-0.5, 0), -(-dim // 8) * 8
    keys = np.zeros((rows, kv_heads, -(-context // 32), dim, 32), np.float32)
    values, scales = np.zeros((rows, kv_heads, context, padded), np.float32), np.zeros((rows, kv_heads, context), "f4")
    slots, positions = np.arange(rows)[::-1].copy(), np.tile(np.arange(context), (rows, 1))
    new = [generator.normal(size=rows * context * kv_heads * dim).astype(np.float32) for _ in range(2)]
    store(0, rows, spec, slots, positions, np.ones_like(positions, bool), *new, keys, values, scales)
    last = generator.integers(1, context + 1, (rows, 1))
    first = np.zeros_like(last) if window is None else np.maximum(last - window, 0)
    query = generator.normal(size=rows * heads * dim).astype(np.float32)
    expected, result = np.empty_like(query), np.empty_like(query)
    arrays = keys, values, scales
    worst = forward_cached(0, rows * kv_heads, spec, query, slots, first, last, *arrays, expected)
    seen = first[:, 0].copy(), last[:, 0].copy()
    assert forward_single(rows, spec, query, slots, *seen, *arrays, result) == worst
    assert result.tobytes() == expected.tobytes()
    # a key more or less is another result
    seen[1][:] = np.where(seen[1] < context, seen[1] + 1, seen[1] - 1)
    forward_single(rows, spec, query, slots, *seen, *arrays, result)
    assert result.tobytes() != expected.tobytes()
