"""Products of linear layers by Triton's kernels: against the eager code and Python's integers, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic import contraction
from ppo_repro.numerics.arithmetic.grid import ROOM, WEIGHT_BITS
from tests.support import integers
from tests.support.cases.awkward import cases, matrix
from tests.support.models import seeded, unequal
from tests.support.triton_kernels import as_on_a_card

from ppo_repro.numerics.kernels.triton import operands, product  # isort: skip - only where Triton is


def by_triton(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    with as_on_a_card():
        return product.linear(operands.input_rows(x, "x"), operands.weight_rows(w, "w"), bias)


def eager(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return contraction.linear(contraction.input_operand(x, "x"), contraction.weight_operand(w, "w"), bias)


def check(k: int, seed: int, stride: str, m: int, n: int) -> None:
    x, w = matrix(m, k, seed, stride), matrix(n, k, seed + 1, stride)
    bias = torch.randn(n, generator=seeded(seed))
    assert unequal(by_triton(x, w, bias), eager(x, w, bias)) == 0


@settings(max_examples=1)
@given(cases, st.integers(1, 20), st.integers(1, 20))
def test_products_equal_the_specification(case: tuple[int, int, str], m: int, n: int) -> None:
    check(*case, m, n)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases, st.integers(1, 90), st.integers(1, 70))
def test_products_equal_the_specification_many(case: tuple[int, int, str], m: int, n: int) -> None:
    check(*case, m, n)


def test_all_kinds_of_rows_meet_each_other() -> None:
    """Zeros of both signs, denormal numbers, ties, outliers, largest magnitudes, and a length that no block divides."""
    x, w = matrix(24, 67, 5, "plain"), matrix(30, 67, 8, "plain")
    got = by_triton(x, w)
    assert unequal(got, eager(x, w)) == 0
    assert unequal(got[:4], integers.linear(x[:4], w)) == 0
    assert contraction.input_operand(x, "x").outliers.any() and contraction.weight_operand(w, "w").outliers.any()


def extreme(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The largest integers of both grids with alternating signs: every digit and every level at its bound."""
    top = 1.0 - 2.0**-24
    signs = torch.where(torch.arange(columns) % 3 == 0, -1.0, 1.0)
    return torch.full((rows, columns), top) * signs, torch.full((rows, columns), (2.0 - 2.0**-23) / ROOM / 2) * signs


@pytest.mark.parametrize("columns", [1, 64, pytest.param(operands.MAX_TERMS, marks=pytest.mark.slow)])
def test_largest_integers_at_the_longest_row_of_digits(columns: int) -> None:
    x, w = extreme(2, columns)
    assert unequal(by_triton(x, w), eager(x, w)) == 0


@pytest.mark.parametrize("tile", [32, 64])
def test_tiles_of_every_card_give_the_same_bits(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles: list[int] = []
    monkeypatch.setattr(product, "rows_of_a_tile", lambda x: tiles.append(len(x)) or tile)
    x, w = matrix(40, 70, 4, "plain"), matrix(9, 70, 6, "plain")
    assert unequal(by_triton(x, w), eager(x, w)) == 0
    assert tiles == [40] and product.blocks(x, as_digits=True) == (tile, 64, 64)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [operands.MAX_TERMS + 1, (1 << 16) + 70])
def test_longer_rows_are_products_of_float64(columns: int) -> None:
    x, w = extreme(2, columns)
    prepared = operands.input_rows(x, "x")
    assert prepared.digits is None and prepared.integers is not None
    assert unequal(by_triton(x, w), eager(x, w)) == 0
    noise = torch.randn(2, columns, generator=seeded(1))
    assert unequal(by_triton(noise, w), eager(noise, w)) == 0


def test_transposed_weights_are_read_where_they_lie() -> None:
    x, w = matrix(3, 20, 1, "plain"), matrix(20, 9, 2, "plain")
    assert unequal(by_triton(x, w.t()), eager(x, w.t())) == 0


def test_products_are_as_accurate_as_float32() -> None:
    x, w = torch.randn(8, 300, generator=seeded(0)), torch.randn(9, 300, generator=seeded(1)) * 0.04
    exact = x.double() @ w.double().t()
    error, stock = ((y.double() - exact).norm() for y in (by_triton(x, w), x @ w.t()))
    assert error < 2 * stock


def test_a_wrong_digit_is_found() -> None:
    """The negative control: one digit of one number, changed by one."""
    x, w = torch.randn(4, 40, generator=seeded(0)), torch.randn(5, 40, generator=seeded(1))
    a, b = operands.input_rows(x, "x"), operands.weight_rows(w, "w")
    assert b.digits is not None
    b.digits[1, 3, 17] += 1
    wrong = product.linear(a, b, None)
    assert (wrong != eager(x, w)).any(0).nonzero()[:, 0].tolist() == [3]


def test_digits_are_those_of_the_integers() -> None:
    x = matrix(12, 70, 3, "plain")
    rows, expected = operands.weight_rows(x, "w"), contraction.weight_operand(x, "w")
    assert rows.digits is not None
    whole = sum(rows.digits[d].double() * 256.0**d for d in range(operands.WEIGHT_DIGITS))
    assert isinstance(whole, Tensor)
    assert torch.equal(whole[:, :70], expected.integers) and not whole[:, 70:].any()
    assert torch.equal(2.0 ** (rows.exponents.double() - WEIGHT_BITS), expected.scale[:, 0])


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    x = torch.ones(3, 5)
    x[1, 2] = bad
    for make in (operands.input_rows, operands.weight_rows):
        with pytest.raises(NumericsError, match="the tensor is not finite"), as_on_a_card():
            make(x, "the tensor")
    with pytest.raises(NumericsError, match="the tensor is not finite"), as_on_a_card():
        operands.weight_rows(torch.tensor([[1.0, 3.37e38]]), "the tensor")
