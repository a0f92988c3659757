"""How many products of grid integers are added in one float64 before their sum is moved on: as many as stay exact."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.numerics.arithmetic.grid import EXACT_TERMS, INPUT_BITS, WEIGHT_BITS
from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.float64 import operands, product, token_operands
from ppo_repro.numerics.kernels.float64.inputs import Inputs, quantised
from ppo_repro.numerics.kernels.float64.tiles import COLUMNS, ROWS, SQUARED, exact_terms
from ppo_repro.numerics.products import NO_BIAS

# Products of these are multiples of 4 close to 2^49: a thousand of them need 57 bits.
_LARGE, _WEIGHT, _HALF = 4 * (2**24 - 1), 8_000_001, 1_000
_LEAST = np.float32(2.0 ** -(INPUT_BITS + WEIGHT_BITS))


@kernel
def _terms(left, right):  # type: ignore[no-untyped-def]
    return exact_terms(left, right)


@given(st.floats(0.0, 2.0**60), st.floats(0.0, 2.0**60))
def test_no_sum_of_so_many_products_can_lose_a_bit(left: float, right: float) -> None:
    terms = int(_terms(left, right))
    if terms > EXACT_TERMS:
        assert terms % SQUARED == 0
        # Cauchy and Schwarz: (sum |a b|)^2 <= (parts of SQUARED terms)^2 left right
        assert Fraction(terms // SQUARED) ** 2 * Fraction(left) * Fraction(right) <= 2**106
    else:
        assert terms == EXACT_TERMS


def test_ordinary_rows_are_added_in_long_groups() -> None:
    x = np.random.default_rng(0).standard_normal((ROWS, 256)).astype(np.float32)
    squares = quantised(x, False).squares[0], operands.pack_weight(x).squares[0]
    assert _terms(*squares) >= SQUARED


def _largest_square(integers: np.ndarray) -> int:
    """Of the sums of squares of columns over SQUARED terms in a row, the largest; integers [terms, columns]."""
    parts = [integers[start : start + SQUARED] for start in range(0, len(integers), SQUARED)]
    return max(sum(int(x) ** 2 for x in column) for part in parts for column in part.T)


def test_squares_are_those_of_the_integers() -> None:
    for terms in (1, 7, 64, 65, 200):
        x = np.exp(np.random.default_rng(terms).standard_normal((2 * COLUMNS + 3, terms)) * 3).astype(np.float32)
        inputs, weight = quantised(x, False), operands.pack_weight(x)
        blocks = inputs.blocks.reshape(-1, terms, ROWS)
        panels = weight.panels.reshape(-1, terms, COLUMNS)
        up = np.full(len(x), 2.0**10)
        tokens, bound = token_operands.scaled_panels(x, up, False)
        for integers, squares in (
            (blocks, inputs.squares),
            (panels, weight.squares),
            (tokens.reshape(-1, len(x), COLUMNS), bound),
        ):
            exact = [_largest_square(part) for part in integers]
            # 64 additions and squares, each rounded to 53 bits
            assert all(abs(s - e) <= 2.0**-40 * e for s, e in zip(squares, exact, strict=True))


def _cancelling(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and weights whose products are large, cancel, and leave the least number that there is: 1 x 1."""
    a = [_LARGE] * _HALF + [-_LARGE] * _HALF + [1]
    b = [_WEIGHT] * (2 * _HALF) + [1]
    x, w = np.array(a) * 2.0**-INPUT_BITS, np.array(b) * 2.0**-WEIGHT_BITS
    return np.tile(x, (rows, 1)).astype(np.float32), np.tile(w, (columns, 1)).astype(np.float32)


def _contracted(x: Inputs, weight: operands.Weight, w: np.ndarray, columns: int) -> np.ndarray:
    y = np.empty((len(x.scales), columns), np.float32)
    assert product.contract(x, weight, w, NO_BIAS, y)
    return y


def test_large_products_that_cancel_lose_nothing_and_would_in_longer_groups() -> None:
    for rows, columns in ((ROWS, COLUMNS), (ROWS + 3, COLUMNS + 5)):
        x, w = _cancelling(rows, columns)
        inputs, weight = quantised(x, False), operands.pack_weight(w)
        assert not (inputs.outliers.any() or weight.outliers.any())
        assert (_contracted(inputs, weight, w, columns) == _LEAST).all()
        assert (_contracted(quantised(x, True), weight, w, columns) == _LEAST).all()
        across = np.ascontiguousarray(w.T)
        assert (_contracted(inputs, operands.column_grids(across), across, columns) == _LEAST).all()
        too_small = replace(inputs, squares=np.zeros_like(inputs.squares))
        assert (_contracted(too_small, weight, w, columns) != _LEAST).any()


def test_gradients_that_cancel_lose_nothing_and_would_in_longer_groups() -> None:
    rows, columns = ROWS + 2, COLUMNS + 3
    grad = _cancelling(rows, columns)[0].T.copy()
    x = np.full((len(grad), columns), 4_000_001, np.float32)  # inputs of gradients have 22 bits
    x[-1] = 1
    up, sums = np.full(len(grad), 2.0**INPUT_BITS), np.empty((rows, columns), np.int64)
    for in_digits in (True, False):
        packed = product.packed_inputs(x, np.ones(len(x)), in_digits)
        for fresh in (True, False):
            sums[:] = 7
            product.accumulate(grad, up, packed, sums, fresh)
            assert (sums == (1 if fresh else 8)).all()
    too_small = replace(packed, squares=np.zeros_like(packed.squares))
    product.accumulate(grad, up, too_small, sums, True)
    assert (sums != 1).any()
