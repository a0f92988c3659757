"""Products of rows with digits made once have the bits of those in float64, and of whole numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ppo_repro.numerics.arithmetic.contraction import most_outliers
from ppo_repro.numerics.arithmetic.grid import INPUT_BITS, ROOM, WEIGHT_BITS
from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.float64 import digit_product, digit_rows, few_rows
from ppo_repro.numerics.kernels.float64.digits import COLUMNS
from ppo_repro.numerics.kernels.float64.operands import pack_weight
from ppo_repro.numerics.kernels.float64.tiles import COLUMNS as PANEL
from ppo_repro.numerics.kernels.float64.tiles import ROWS

# parts of kernels, which Python cannot call, as kernels
PARTS = digit_rows.put_in_digits, digit_rows.multiply_by_digits, few_rows.put_on_grid
put_in_digits, multiply_by_digits, put_on_grid = (kernel(part.py_func) for part in PARTS)
make_digit_rows = kernel(lambda rows, terms: digit_rows.make_digit_rows(rows, terms))
AFTER = 7.0  # stands after what may be written


def memory(rows: int, terms: int) -> digit_rows.DigitRows:
    own = make_digit_rows(rows, terms)
    own.outliers[:] = True  # of other rows before
    return own


def multiplied(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """x w^T + bias without outliers, x [R, K] and w [N, K] float32."""
    (rows, terms), columns = x.shape, len(w)
    packed, own, limits = pack_weight(w), memory(rows, terms), np.empty(rows, np.float32)
    assert put_in_digits(x.reshape(-1), terms, most_outliers(terms), own, limits) > 0
    weights, squares = digit_rows.weight_digits(packed, terms)
    padded = -(-columns // PANEL) * PANEL
    factors, offsets = np.zeros(padded), np.zeros(padded, np.float32)
    factors[:columns], offsets[:columns] = np.ldexp(1.0, packed.exponents - WEIGHT_BITS), bias
    y = np.full(rows * columns + 8, AFTER, np.float32)
    addresses = factors.ctypes.data, offsets.ctypes.data
    multiply_by_digits(own, terms, weights.ctypes.data, squares, *addresses, columns, y[: rows * columns])
    assert (y[rows * columns :] == AFTER).all()
    return y[: rows * columns].reshape(rows, columns)


def by_integers(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The same in Python's integers: one rounding to float64, one to float32, then the bias."""
    rows, terms = x.shape
    inputs, scales, limits = np.zeros((rows, terms + few_rows.PADDING)), np.ones(rows), np.empty(rows, np.float32)
    put_on_grid(x.reshape(-1), terms, most_outliers(terms), inputs.reshape(-1), scales, limits)
    packed = pack_weight(w)
    panels = packed.panels.reshape(-1, terms, PANEL)
    y = np.empty((rows, len(w)), np.float32)
    for m, row in enumerate(inputs[:, :terms].tolist()):
        for n, e in enumerate(packed.exponents.tolist()):
            total = sum(int(a) * b for a, b in zip(row, panels[n // PANEL, :, n % PANEL].tolist(), strict=True))
            scaled = float(total) * float(scales[m]) * 2.0 ** (e - WEIGHT_BITS)
            y[m, n] = np.float32(scaled) + np.float32(0.0) + bias[n]
    return y


@pytest.mark.parametrize("rows", [8, 13, 16])
@pytest.mark.parametrize("shape", [(1, 5), (39, 24), (40, 47), (130, 48), (257, 100), (300, 121)])
def test_products_are_those_of_integers(rows: int, shape: tuple[int, int]) -> None:
    terms, columns = shape
    generator = np.random.default_rng(rows * terms)
    x, w = generator.normal(size=(rows, terms)).astype(np.float32), generator.normal(size=(columns, terms))
    x[2] = 0.0
    if terms > 100:
        x[1, 7], w[3, 5] = 1e5, 1e4  # outliers: in no product
    arguments = x, w.astype(np.float32), generator.normal(size=columns).astype(np.float32)
    assert multiplied(*arguments).tobytes() == by_integers(*arguments).tobytes()


@pytest.mark.parametrize("signs", ["alike", "that cancel"])
def test_the_largest_integers_of_the_most_terms_lose_nothing(signs: str) -> None:
    """The largest sums that int32 and int64 have to hold; how long a group may be is tested below."""
    rows, terms, columns = ROWS, digit_rows.MOST_TERMS, 2
    x = np.full((rows, terms), np.float32(1.0) - np.float32(2.0**-24), np.float32)
    w = np.full((columns, terms), np.float32(1.0 / ROOM) * (1 - np.float32(2.0**-20)), np.float32)
    if signs == "that cancel":
        w[:, terms // 2 :] *= -1
        w[:, 0] *= 0.5
    bias = np.zeros(columns, np.float32)
    expected = by_integers(x, w, bias)
    assert multiplied(x, w, bias).tobytes() == expected.tobytes()


def test_the_status_and_the_limits_are_those_of_float64() -> None:
    rows, terms = 11, 160
    x = np.random.default_rng(0).normal(size=(rows, terms)).astype(np.float32)
    for change, status in ((lambda: None, 1), (lambda: x.__setitem__((9, 3), 1e6), 2)):
        change()
        inputs, scales = np.zeros(rows * (terms + few_rows.PADDING)), np.ones(rows)
        limits, own_limits = np.empty((2, rows), np.float32)
        own = memory(rows, terms)
        assert put_on_grid(x.reshape(-1), terms, most_outliers(terms), inputs, scales, limits) == status
        assert put_in_digits(x.reshape(-1), terms, most_outliers(terms), own, own_limits) == status
        assert (limits == own_limits).all() and (own.scales == scales).all()
        assert np.isfinite(limits).any() == (status == 2)
    for bad in (np.inf, -np.inf, np.nan):
        x[10, 0] = bad
        assert put_in_digits(x.reshape(-1), terms, most_outliers(terms), memory(rows, terms), own_limits) == 0


def test_a_group_of_pairs_is_as_long_as_int32_allows() -> None:
    """The control: with the largest digits one pair more than `most_pairs` passes int32."""
    pairs = digit_product.most_pairs(1 << INPUT_BITS, 1 << WEIGHT_BITS)
    a1, b1, low = (1 << (INPUT_BITS - 13)) + 1, (1 << (WEIGHT_BITS - 13)) + 1, 1 << 12
    assert pairs * 2 * (a1 * low + low * b1) < 2**31 <= (pairs + 1) * 2 * (a1 * low + low * b1)


def test_float64_takes_what_would_leave_most_of_a_block_empty() -> None:
    worth = kernel(lambda rows: digit_rows.worth_digits(rows))
    assert [rows for rows in range(1, 25) if worth(rows)] == [7, 8, 13, 14, 15, 16, *range(20, 25)]


def test_tiles_of_a_matrix_have_the_larger_squares_of_their_panels() -> None:
    w = np.ones((3 * PANEL, 8), np.float32)
    w[PANEL:] *= 0.75
    packed = pack_weight(w)
    packed = replace(packed, squares=np.array([1.0, 4.0, 2.0]))
    _, squares = digit_rows.weight_digits(packed, 8)
    assert squares.tolist() == [4.0, 2.0] and 2 * PANEL == COLUMNS
