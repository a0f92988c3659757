"""Sums on grids against exact rational arithmetic, and their independence of order and of other rows."""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic import grid
from ppo_repro.numerics.arithmetic.grid import contract, exact_dot, exact_mean, exact_product, quantise, round_limbs
from tests.support.models import bits, seeded, unequal

KINDS = ("any", "wide", "ties", "denormal", "zeros", "near")
seeds = st.integers(0, 2**32 - 1)


def row(kind: str, length: int, words: np.random.Generator) -> np.ndarray:
    """Float32 values; `any` and `wide` draw raw bits, so that every exponent and both zeros occur."""
    raw = words.integers(0, 2**32, length, dtype=np.uint64).astype(np.uint32)
    if kind == "any":
        # values above 2^63 would make most products overflow
        raw = np.where((raw >> 23) & 0xFF > 190, raw & 0x80FFFFFF, raw)
    elif kind == "wide":
        raw = np.where((raw >> 23) & 0xFF == 0xFF, raw ^ 0x40000000, raw)
    elif kind == "denormal":
        raw = raw & 0x807FFFFF
    elif kind == "zeros":
        raw = raw & 0x80000000
    values = raw.view(np.float32)
    if kind == "ties":  # half units of a 20-bit grid whose maximum is just below 1
        values = (words.integers(-(2**21) + 1, 2**21, length) / np.float64(2**21)).astype(np.float32)
        values[0] = 1 - 2.0**-21
    if kind == "near":
        values = words.standard_normal(length).astype(np.float32)
    return values


def matrix(rows: int, length: int, seed: int, kinds: list[str], strided: bool) -> Tensor:
    words = np.random.Generator(np.random.Philox(seed))
    values = torch.from_numpy(np.stack([row(kinds[i % len(kinds)], length, words) for i in range(rows)]))
    if not strided:
        return values
    wide = torch.full((length, 2 * rows), float("nan"))
    wide[:, ::2] = values.t()
    return wide[:, ::2].t()


def grid_of(values: list[float], p: int) -> tuple[list[int], Fraction]:
    """The definition: 2^e the smallest power above max |x|, e >= -100; integers round to nearest, ties to even."""
    largest = max(abs(Fraction(x)) for x in values)
    e = -100
    while largest >= Fraction(2) ** e:
        e += 1
    scale = Fraction(2) ** (e - p)
    return [round(Fraction(x) / scale) for x in values], scale


def to_float32(x: Fraction) -> float:
    """Round to the nearest float32, ties to even, denormals and overflow included; zero comes out positive."""
    if x == 0:
        return 0.0
    magnitude = abs(x)
    e = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** e > magnitude:
        e -= 1
    unit = Fraction(2) ** (max(e, -126) - 23)
    rounded = round(magnitude / unit) * unit
    if rounded >= Fraction(2) ** 128:
        return math.copysign(math.inf, x)
    # what rounds to zero keeps its sign until the added zero takes it
    return math.copysign(float(rounded), x) if rounded else 0.0


def int32(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]


kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)


@settings(max_examples=200)
@given(seeds, st.integers(1, 130), kinds, kinds, st.booleans(), st.integers(12, 26), st.integers(12, 24))
def test_quantise_and_contract_equal_rational_arithmetic(
    seed: int, length: int, left: list[str], right: list[str], strided: bool, p: int, q: int
) -> None:
    a, b = matrix(2, length, seed, left, strided), matrix(2, length, seed + 1, right, not strided)
    grids = [quantise(a, p), quantise(b, q)]
    expected = [[grid_of(values, bits_) for values in m.tolist()] for m, bits_ in ((a, p), (b, q))]
    for (integers, scale), rows in zip(grids, expected, strict=True):
        assert [[int(v) for v in values] for values in integers.tolist()] == [r[0] for r in rows]
        assert [Fraction(s) for s in scale[:, 0].tolist()] == [r[1] for r in rows]
    got = bits(contract(grids[0], grids[1])).tolist()
    for i, (ai, a_scale) in enumerate(expected[0]):
        for j, (bj, b_scale) in enumerate(expected[1]):
            total = sum(x * y for x, y in zip(ai, bj, strict=True))
            rounded = Fraction(float(total))  # Python rounds the integer once
            assert got[i][j] == int32(to_float32(rounded * a_scale * b_scale)), (i, j)


@settings(max_examples=300)
@given(seeds, st.integers(2, 130), kinds, st.booleans())
def test_contract_ignores_the_order_of_the_terms_and_the_other_rows(
    seed: int, length: int, kinds: list[str], strided: bool
) -> None:
    p, q = 26, 23
    a, b = matrix(5, length, seed, kinds, strided), matrix(4, length, seed + 1, kinds[::-1], strided)
    whole = contract(quantise(a, p), quantise(b, q))
    order = torch.randperm(length, generator=seeded(seed))
    assert unequal(contract(quantise(a[:, order], p), quantise(b[:, order], q)), whole) == 0
    for i, j in ((0, 0), (4, 3), (2, 1)):
        alone = contract(quantise(a[i : i + 1], p), quantise(b[j : j + 1], q))
        assert unequal(alone, whole[i : i + 1, j : j + 1]) == 0


def test_plain_float32_products_change_with_the_order_of_the_terms() -> None:
    a, b = (torch.randn(20, 257, generator=seeded(s)) for s in (0, 1))
    orders = [torch.randperm(257, generator=seeded(s)) for s in range(20)]
    assert all(unequal(a[:, o] @ b[:, o].t(), a @ b.t()) > 0 for o in orders)


def test_quantise_along_another_axis_is_quantise_of_the_transpose() -> None:
    x = matrix(7, 33, 0, list(KINDS), False)
    integers, scale = quantise(x, 20, dim=0)
    by_column = quantise(x.t(), 20)
    assert torch.equal(integers, by_column[0].t()) and torch.equal(scale, by_column[1].t())


def test_a_zero_sum_is_positive_zero_whatever_the_signs() -> None:
    a = quantise(torch.tensor([[-0.0, 0.0], [1.0, -1.0], [-1e-38, 0.0]]), 20)
    b = quantise(torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1e-38, 0.0]]), 20)
    y = contract(a, b)
    assert bits(y)[0].tolist() == [0, 0, 0]
    assert bits(y)[1, :2].tolist() == [0, 0]
    assert bits(y)[2, 2].item() == 0  # -1e-76 underflows


def largest(shape: tuple[int, ...], bits_: int, seed: int) -> Tensor:
    """Integers of full magnitude, most of them with one sign, so that sums grow as far as they can."""
    signs = torch.where(torch.rand(shape, generator=seeded(seed)) < 0.9, 1.0, -1.0)
    return (signs * (2.0**bits_ - torch.randint(0, 2, shape, generator=seeded(seed + 1)))).to(torch.float64)


@pytest.mark.parametrize("terms", [1, 17, 4096, 2**16, 2**16 + 1, 200_000])
@pytest.mark.parametrize("operands", [(26, 23), (25, 24), (24, 25)])
def test_products_are_rounded_once_however_many_terms_they_have(terms: int, operands: tuple[int, int]) -> None:
    a, b = largest((2, terms), operands[0], terms), largest((terms, 2), operands[1], terms + 9)
    got = exact_product(a, b)
    left, right = ([[int(v) for v in row] for row in m.tolist()] for m in (a, b.t()))
    for i, x in enumerate(left):
        for j, y in enumerate(right):
            assert float(got[i, j]) == float(sum(p * q for p, q in zip(x, y, strict=True)))


@pytest.mark.parametrize("terms", [1, 3, 1000, 2**16])
def test_dot_products_are_rounded_once(terms: int) -> None:
    a, b = largest((3, terms), 26, terms), largest((3, terms), 26, terms + 5)
    expected = [
        float(sum(int(p) * int(q) for p, q in zip(x, y, strict=True)))
        for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert exact_dot(a, b)[:, 0].tolist() == expected


def test_one_float64_would_lose_the_small_terms_of_such_a_sum() -> None:
    a, b = (torch.cat([torch.full((32,), 2.0**p), torch.ones(64)]).to(torch.float64) for p in (26, 23))
    total = 0.0
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        total += x * y  # above 2^54 adding 1 changes nothing
    assert total == 2.0**54
    assert exact_product(a[None], b[:, None]).item() == exact_dot(a, b).item() == 2.0**54 + 64


def test_more_terms_than_the_sums_hold_are_refused() -> None:
    for compute in (exact_product, lambda a, b: exact_dot(a, b.t())):
        with pytest.raises(NumericsError, match=str(2**20 + 1)):
            compute(torch.zeros(1, 2**20 + 1, dtype=torch.float64), torch.zeros(2**20 + 1, 1, dtype=torch.float64))


@given(st.integers(-(2**59), 2**59), st.integers(-(2**62), 2**62), st.sampled_from([13, 26]))
def test_two_limbs_are_rounded_once(above: int, below: int, shift: int) -> None:
    got = round_limbs(torch.tensor([above]), torch.tensor([below]), shift)
    assert got.item() == float((above << shift) + below)


def test_two_float64s_reach_as_far_as_the_longest_sum() -> None:
    most = grid.MAX_TERMS << grid.PRODUCT_BITS
    start, unit = int(grid.HIGH_START), 2 ** (72 - 52)
    assert start - most >= 2**72 and start + most < 2**73, "the high part keeps its unit"
    assert grid.MAX_TERMS // grid.EXACT_TERMS * unit // 2 <= 2**53, "the low part stays exact"
    assert grid.EXACT_TERMS << grid.PRODUCT_BITS <= 2**53
    assert grid.INPUT_BITS + grid.WEIGHT_BITS <= grid.PRODUCT_BITS
    assert grid.LEFT_BITS + grid.RIGHT_BITS <= grid.PRODUCT_BITS
    assert grid.GRADIENT_BITS + grid.GRADIENT_INPUT_BITS <= grid.PRODUCT_BITS


@settings(max_examples=500)
@given(st.lists(st.floats(allow_nan=False, width=32, max_value=2.0**100, min_value=-(2.0**100)), max_size=60), seeds)
def test_exact_mean_is_the_rounded_sum_in_any_order(values: list[float], seed: int) -> None:
    mean = exact_mean(torch.tensor(values))
    shuffled = values.copy()
    random.Random(seed).shuffle(shuffled)
    assert struct.pack("<d", exact_mean(torch.tensor(shuffled))) == struct.pack("<d", mean)
    total = sum((Fraction(x) for x in values), Fraction(0))
    assert mean == (float(total) / len(values) if values else 0.0)


def test_plain_sums_change_with_the_order() -> None:
    x = torch.randn(1000, generator=seeded(0))
    means = {float(x[torch.randperm(1000, generator=seeded(s))].sum()) for s in range(20)}
    exact = {exact_mean(x[torch.randperm(1000, generator=seeded(s))]) for s in range(20)}
    assert len(means) > 1 and len(exact) == 1
