"""AMX kernels piece by piece: tiles, products and gradients against Python's integers and the specification."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic import contraction
from ppo_repro.numerics.arithmetic.contraction import Operand, input_operand, weight_operand
from ppo_repro.numerics.kernels.amx import gradient, operands, product, tiles
from ppo_repro.numerics.kernels.core import rows
from tests.support.cases.awkward import cases, matrix
from tests.support.kernels import using
from tests.support.models import seeded, unequal

needs_amx = pytest.mark.skipif(not backend.has_amx(), reason="this CPU has no AMX")
NO_BIAS = np.empty(0, np.float32)
SIZES = st.integers(1, 40)
THREADS = st.integers(1, 3)
Case = tuple[int, int, str]


def test_products_of_digits_are_ordered_so_that_few_wait_and_few_are_loaded() -> None:
    order = tiles.PRODUCTS
    assert sorted(order) == [(i, j) for i in range(4) for j in range(3)]
    levels = [i + j for i, j in order]
    assert all(levels[n] != levels[(n + k) % 12] for n in range(12) for k in (1, 2, 3))
    assert all((a[0] == b[0]) != (a[1] == b[1]) for a, b in pairwise(order))


def with_outliers(count: int, terms: int, seed: int, stride: str) -> Tensor:
    """Awkward rows, and in every third one numbers far above the others; where there are two, they are outliers."""
    x = matrix(count, terms, seed, stride).clone()
    generator = seeded(seed)
    for row in range(0, count, 3):
        at = torch.randint(0, terms, (int(torch.randint(1, 3, (1,), generator=generator)),), generator=generator)
        x[row, at] = torch.randn(len(at), generator=generator) * 2.0**75
    return x


def array(x: Tensor) -> np.ndarray:
    return x.contiguous().numpy()


def decoded(packed: np.ndarray, digits: int, outputs: int, terms: int, is_a: bool) -> np.ndarray:
    """The integers [outputs, terms] in the tiles of an operand."""
    blocks = (-(-outputs // 16), -(-terms // 64), digits)
    if is_a:  # row, term
        d = packed.reshape(*blocks, 16, 64).transpose(2, 0, 3, 1, 4)
    else:  # four terms, column, term of the four
        d = packed.reshape(*blocks, 16, 16, 4).transpose(2, 0, 4, 1, 3, 5)
    d = d.reshape(digits, blocks[0] * 16, blocks[1] * 64)[:, :outputs, :terms].astype(np.int64)
    total: np.ndarray = (d * 256 ** np.arange(digits)[:, None, None]).sum(0)
    return total


def check_operand(
    got: operands.PackedRows | operands.PackedWeight, digits: int, is_a: bool, expected: Operand, seed: int
) -> None:
    outputs, terms = expected.values.shape
    assert got.finite and got.outliers.tolist() == expected.outliers.any(1).tolist(), seed
    assert (got.scales[:outputs] == expected.scale[:, 0].numpy()).all()
    assert (decoded(got.tiles, digits, outputs, terms, is_a) == expected.integers.numpy()).all()


@settings(max_examples=150)
@given(cases, SIZES, THREADS, st.booleans())
def test_operands_are_those_of_the_specification(case: Case, count: int, threads: int, outliers: bool) -> None:
    terms, seed, stride = case
    x = (with_outliers if outliers else matrix)(count, terms, seed, stride)
    inputs, weights = input_operand(x, "x"), weight_operand(x, "w")
    with using("float64", threads):  # for its threads; operands are packed by ordinary instructions
        got = operands.quantise_rows(array(x))
        check_operand(got, 4, True, inputs, seed)
        assert got.exponents.tolist() == rows.row_exponents(array(x)).tolist()  # type: ignore[union-attr]
        check_operand(operands.pack(array(x), True), 3, False, weights, seed)
        check_operand(operands.pack(array(x.t()), False), 3, False, weights, seed)


def test_a_weight_at_the_edge_of_the_digits_and_of_the_outliers() -> None:
    edge = float(operands._LEAST_OVER)
    below = float(np.nextafter(np.float32(edge), np.float32(0)))
    # as long as its rounded product with ROOM is below 1, a number is on the grid of 2^0
    rows = (
        [below, -below, *[0.5] * 5],
        [edge, -edge, *[0.5] * 5],
        [edge, 0.01, *[0.03] * 5],
        [16 * edge, *[below] * 6],
    )
    x = torch.tensor(rows)
    packed = operands.pack(array(x), True)
    check_operand(packed, 3, False, weight_operand(x, "w"), 0)
    assert packed.scales[:4].tolist() == [2.0**-23, 2.0**-22, 2.0 ** (-5 - 23), 2.0**-23]
    assert packed.outliers.tolist() == [False, False, True, True]
    assert abs(decoded(packed.tiles, 3, 4, 3, False)).max() == round(below * 2**23) <= 8_355_711


def expected_product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    a, b = input_operand(x, "x"), weight_operand(w, "w")
    y = contraction.contract((a.integers, a.scale), (b.integers, b.scale))
    return y if bias is None else y + bias


def contracted(x: Tensor, w: Tensor, along_rows: bool, bias: Tensor | None = None) -> Tensor:
    y = np.empty((len(x), len(w)), np.float32)
    weight = operands.pack(array(w if along_rows else w.t()), along_rows)
    values = NO_BIAS if bias is None else product.padded_bias(array(bias))
    assert product.contract(operands.quantise_rows(array(x)), weight, values, y)
    return torch.from_numpy(y)


@needs_amx
@settings(max_examples=150)
@given(cases, SIZES, SIZES, THREADS, st.booleans())
def test_products_are_those_of_the_specification(case: Case, m: int, n: int, threads: int, outliers: bool) -> None:
    terms, seed, stride = case
    make = with_outliers if outliers else matrix
    x, w, bias = make(m, terms, seed, stride), make(n, terms, seed + 1, stride), torch.randn(n, generator=seeded(seed))
    with using("amx", threads):
        assert unequal(contracted(x, w, True), expected_product(x, w, None)) == 0
        assert unequal(contracted(x, w, False, bias), expected_product(x, w, bias)) == 0


@needs_amx
@pytest.mark.parametrize("along_rows", [True, False])
def test_the_longest_sums_of_the_largest_integers(along_rows: bool) -> None:
    terms = operands.MAX_TERMS
    x = torch.randn(3, terms, generator=seeded(0))
    w = torch.randn(5, terms, generator=seeded(1))
    x[0], w[0], w[1] = 2.0 - 2.0**-23, float(operands._LEAST_OVER) * (1 - 2.0**-20), -0.98
    x[1] = x[0] * torch.sign(x[1])
    w[2] = w[0] * torch.sign(x[1])
    assert unequal(contracted(x, w, along_rows), expected_product(x, w, None)) == 0
    largest = (input_operand(x[:1], "x").integers * weight_operand(w[:1], "w").integers).to(torch.int64).sum()
    assert 2**62 < int(largest) < 2**63
    with pytest.raises(ValueError, match="16385 terms"):
        operands.pack(np.zeros((2, terms + 1), np.float32), True)


@needs_amx
@pytest.mark.parametrize(("least", "expected"), [(0, 2.0**61), (1, 2.0**61 + 2.0**38)])
def test_a_sum_is_rounded_once_to_float64_then_to_float32(least: int, expected: float) -> None:
    # 2^61 + 2^37 + 2^8 + least: halfway between two float64 numbers, or beyond, next to the middle of two float32
    x, w = torch.full((1, 16384), 0.5), torch.full((1, 16384), 0.5)
    x[0, :5], w[0, :5] = torch.tensor([0.75, 0.75, 0.5, 0.5, 0.5]), torch.tensor([0.75, 0.75, 0.75, 0.75, 0.25])
    x[0, 5:8], w[0, 5:8] = (
        torch.tensor([2.0**-6, 2.0**-18, least * 2.0**-26]),
        torch.tensor([2.0**-6, 2.0**-23, 2.0**-23]),
    )
    a, b = input_operand(x, "x").integers[0].tolist(), weight_operand(w, "w").integers[0].tolist()
    assert sum(int(i) * int(j) for i, j in zip(a, b, strict=True)) == 2**61 + 2**37 + 2**8 + least
    assert contracted(x, w, True).item() == expected * 2.0**-49


def integer_sums(z: np.ndarray, x: np.ndarray) -> np.ndarray:
    total: np.ndarray = (z.astype(object).T @ x.astype(object)).astype(np.int64)
    return total


@needs_amx
@settings(max_examples=100)
@given(st.integers(1, 200), SIZES, SIZES, THREADS, st.integers(0, 2**31), st.booleans())
def test_gradients_are_sums_of_integers(t: int, n: int, k: int, threads: int, seed: int, extreme: bool) -> None:
    rng = np.random.default_rng(seed)
    z, x = rng.integers(-(2**24), 2**24, (t, n)), rng.integers(-(2**22), 2**22 + 1, (t, k))
    z = 8 * z if extreme else z  # 27 bits of which a float32 holds 24
    if extreme:
        z[rng.random(z.shape) < 0.5], x[rng.random(x.shape) < 0.5] = 2**27, -(2**22)
    z_shift, x_shift = rng.integers(-90, 121, t), rng.integers(-90, 121, t)
    grad, inputs = (np.ldexp(v, -shift[:, None]).astype(np.float32) for v, shift in ((z, z_shift), (x, x_shift)))
    before = rng.integers(-(2**40), 2**40, (n, k))
    with using("amx", threads):
        packed = gradient.pack_inputs(inputs, np.ldexp(1.0, x_shift))
        for fresh in (True, False):
            sums = before.copy()
            gradient.accumulate(grad, np.ldexp(1.0, z_shift), packed, sums, fresh)
            assert (sums == integer_sums(z, x) + (0 if fresh else before)).all(), fresh


@needs_amx
def test_gradients_of_more_tokens_than_an_int32_sum_holds() -> None:
    tokens = gradient.MAX_TOKENS + 70
    # the digits of z are -128, -128, -128, -7, and those of x -128, -128, -1; the largest products are of -128
    z, x = np.full((tokens, 2), -0x7808080, np.int64), np.full((tokens, 3), -0x18080, np.int64)
    z[1::2, 1], x[::3, 2] = 2**27, 2**22
    one, sums = np.ones(tokens), np.zeros((2, 3), np.int64)
    gradient.accumulate(z.astype(np.float32), one, gradient.pack_inputs(x.astype(np.float32), one), sums, True)
    assert (sums == integer_sums(z, x)).all()
