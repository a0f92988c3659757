"""Merged weights and gradients of low-rank factors: by hand, by their definition, in any order."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.optim import low_rank
from tests.support.float32 import bits, tensor
from tests.support.in_order import product_in_order
from tests.support.models import seeded, unequal

BASE = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
A, B = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [-1.0]])
GRADIENT = torch.tensor([[1.0, 0.0], [2.0, -1.0]])


@pytest.mark.parametrize("merge", [low_rank.merge, low_rank.merge_native])
def test_a_merge_worked_by_hand(merge: object) -> None:
    # B A = [[3, 6], [-1, -2]]
    assert callable(merge) and merge(BASE, A, B, 0.5).tolist() == [[2.5, 5.0], [2.5, 3.0]]


@pytest.mark.parametrize("gradients", [low_rank.factor_gradients, low_rank.factor_gradients_native])
def test_gradients_worked_by_hand(gradients: object) -> None:
    assert callable(gradients)
    d_a, d_b = gradients(GRADIENT, A, B, 0.5)
    # B^T G = [3 - 2, 0 + 1]; G A^T = [1 + 0, 2 - 2]
    assert d_a.tolist() == [[0.5, 0.5]] and d_b.tolist() == [[0.5], [0.0]]


def on_grid(row: list[float], bits: int) -> list[Fraction]:
    """A row on its grid: round half to even in units of 2^(e - bits), 2^e > max, e >= -100."""
    largest = max(abs(x) for x in row)
    e = max(math.frexp(largest)[1], -100) if largest else -100
    unit = Fraction(2) ** (e - bits)
    return [round(Fraction(x) / unit) * unit for x in row]


def slow_merge(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """From the definition, in rationals up to the sum, one rounding to float64, a product, a sum, one to float32."""
    columns = [on_grid(column, 24) for column in a.t().tolist()]
    merged = base.clone()
    for n, row in enumerate(b.tolist()):
        for k, column in enumerate(columns):
            total = sum((x * y for x, y in zip(on_grid(row, 26), column, strict=True)), Fraction(0))
            if total:
                merged[n, k] = float(np.float32(float(base[n, k]) + float(total) * scale))
    return merged


small = st.one_of(st.just(0.0), st.just(-0.0), st.floats(-8, 8, width=32), st.floats(-(2.0**-100), 2.0**-100, width=32))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1.0, 0.3, 2.0, 1e-3]), st.data())
def test_a_merge_is_its_definition_bit_for_bit(
    rank: int, rows: int, columns: int, scale: float, data: st.DataObject
) -> None:
    def matrix(first: int, second: int) -> Tensor:
        flat = data.draw(st.lists(small, min_size=first * second, max_size=first * second))
        return tensor(flat).view(first, second)

    base, a, b = matrix(rows, columns), matrix(rank, columns), matrix(rows, rank)
    assert bits(low_rank.merge(base, a, b, scale)) == bits(slow_merge(base, a, b, scale))


def random_factors(rank: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((rows, columns), (rank, columns), (rows, rank))
    base, a, b = (torch.randn(s, generator=seeded(seed)) for seed, s in enumerate(shapes))
    return base, a, b


def merge_in_order(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return weight + product_in_order(b, a) * scale


def factor_gradients_in_order(gradient: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return product_in_order(b.T, gradient) * scale, product_in_order(gradient, a.T) * scale


def test_no_order_of_a_sum_changes_a_bit_and_where_it_is_rounded_term_by_term_it_does() -> None:
    rank, rows, columns = 64, 48, 80
    base, a, b = random_factors(rank, rows, columns)
    gradient = torch.randn(rows, columns, generator=seeded(9))
    orders = [torch.randperm(n, generator=seeded(n)) for n in (rank, rows, columns)]
    of_rank, of_rows, of_columns = orders
    for merge, gradients, equal in (
        (low_rank.merge, low_rank.factor_gradients, True),
        (merge_in_order, factor_gradients_in_order, False),
    ):
        differing = unequal(merge(base, a, b, 0.3), merge(base, a[of_rank], b[:, of_rank], 0.3))
        d_a, d_b = gradients(gradient, a, b, 0.3)
        other_a, _ = gradients(gradient[of_rows], a, b[of_rows], 0.3)
        _, other_b = gradients(gradient[:, of_columns], a[:, of_columns], b, 0.3)
        differences = [differing, unequal(d_a, other_a), unequal(d_b, other_b)]
        assert differences == [0, 0, 0] if equal else min(differences) > 0


def test_a_weight_to_which_nothing_is_added_keeps_its_bits() -> None:
    base, a, _ = random_factors(3, 4, 5)
    base[0, 0], base[1, 1], base[2, 2] = -0.0, 2.0**-149, -(2.0**-140)
    assert unequal(low_rank.merge(base, a, torch.zeros(4, 3), 2.0), base) == 0
    # control: the plain sum loses the sign of zero
    assert unequal(low_rank.merge_native(base, a, torch.zeros(4, 3), 2.0), base) == 1


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_merges_and_gradients_are_as_accurate_as_the_grids_promise(rank: int) -> None:
    rows, columns, scale = 40, 56, 0.7
    base, a, b = random_factors(rank, rows, columns)
    gradient = torch.randn(rows, columns, generator=seeded(9))
    w64, a64, b64, g64 = (x.double() for x in (base, a, b, gradient))
    d_a, d_b = low_rank.factor_gradients(gradient, a, b, scale)
    pairs = (
        (low_rank.merge(base, a, b, scale), w64 + scale * b64 @ a64, b, a.t(), w64.abs() + 10),
        (d_a, scale * b64.t() @ g64, b.t(), gradient.t(), (scale * b64.t() @ g64).abs()),
        (d_b, scale * g64 @ a64.t(), gradient, a, (scale * g64 @ a64.t()).abs()),
    )
    for got, exact, left, right, size in pairs:
        # grids of 26 and 24 bits are up to 2^-26 and 2^-24 of the largest of a row away from it, as 2^e <= 2 max
        largest = left.double().abs().amax(-1)[:, None] * right.double().abs().amax(-1)[None]
        bound = scale * left.shape[1] * largest * 2.0**-23 + size * 2.0**-22
        assert bool(((got.double() - exact).abs() <= bound).all())


def test_a_factor_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(NumericsError, match="not finite"):
        low_rank.merge(BASE, A * math.inf, B, 1.0)
