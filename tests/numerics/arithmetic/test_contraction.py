"""Linear layers on grids with outliers: against Python's integers, and against float64 beside stock float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic import contraction
from ppo_repro.numerics.arithmetic.contraction import Operand, input_operand, linear, most_outliers, weight_operand
from tests.support import integers
from tests.support.cases.awkward import cases, matrix
from tests.support.models import seeded, unequal


def product(x: Tensor, w: Tensor) -> Tensor:
    return linear(input_operand(x, "x"), weight_operand(w, "w"))


def rms(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


def error(y: Tensor, x: Tensor, w: Tensor) -> float:
    exact = x.double() @ w.double().t()
    return rms(y.double() - exact) / rms(exact)


@settings(max_examples=150)
@given(cases, st.integers(1, 6), st.integers(1, 6))
def test_a_product_equals_its_definition_in_integers(case: tuple[int, int, str], m: int, n: int) -> None:
    k, seed, stride = case
    x, w = matrix(m, k, seed, stride), matrix(n, k, seed + 1, stride)
    bias = torch.randn(n, generator=seeded(seed))
    assert unequal(linear(input_operand(x, "x"), weight_operand(w, "w"), bias), integers.linear(x, w, bias)) == 0


def test_what_is_an_outlier_by_hand() -> None:
    others = [1.0, 1.5, -1.3, 1.2, 1.1, 0.1]
    rows = [[64.0, *others], [63.0, *others], [64.0, -70.0, *others], [*[64.0] * 5, 0.5], [3.0, *[0.0] * 5]]
    # of a short row the fifth largest number sets the grid where the largest has an exponent 6 above its
    assert [input_operand(torch.tensor([row]), "x").outliers[0].nonzero()[:, 0].tolist() for row in rows] == [
        [0],
        [],
        [0, 1],
        [],
        [0],
    ]
    scales = [float(input_operand(torch.tensor([row]), "x").scale.log2()) for row in rows]
    assert scales == [1 - 26, 6 - 26, 1 - 26, 7 - 26, -100 - 26]
    assert [most_outliers(k) for k in (1, 3, 256, 320, 640)] == [0, 2, 4, 5, 10]


@settings(max_examples=100)
@given(cases)
def test_a_row_does_not_depend_on_the_others(case: tuple[int, int, str]) -> None:
    k, seed, stride = case
    x, w = matrix(5, k, seed, stride), matrix(4, k, seed + 1, stride)
    whole = product(x, w)
    for m, n in ((0, 0), (4, 3), (2, 1)):
        assert unequal(product(x[m : m + 1], w[n : n + 1]), whole[m : m + 1, n : n + 1]) == 0


def plain(terms: int = 576) -> tuple[Tensor, Tensor]:
    return torch.randn(64, terms, generator=seeded(0)), torch.randn(96, terms, generator=seeded(1)) * 0.04


def test_plain_products_are_as_accurate_as_float32() -> None:
    x, w = plain()
    assert error(product(x, w), x, w) < 2 * error(x @ w.t(), x, w)


def with_large_input() -> tuple[Tensor, Tensor]:
    """An input of 1e4 times the others, with a small weight: its product is no larger than theirs."""
    x, w = plain()
    x[:, 7] *= 1e4
    w[:, 7] *= 1e-4
    return x, w


def with_large_weight() -> tuple[Tensor, Tensor]:
    """A weight of 1e4 on a channel that is nearly silent."""
    x, w = plain()
    w[::3, 11] = 1e4
    x[:, 11] *= 1e-6
    return x, w


@pytest.mark.parametrize("case", [with_large_input, with_large_weight])
def test_outliers_do_not_take_the_bits_of_the_others(case, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    x, w = case()
    stock = error(x @ w.t(), x, w)
    assert error(product(x, w), x, w) < 2 * stock
    monkeypatch.setattr(contraction, "INPUT_GAP", 99)
    monkeypatch.setattr(contraction, "WEIGHT_GAP", 99)
    assert error(product(x, w), x, w) > 20 * stock, "on one grid the others would lose their bits"


def test_wider_grids_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = plain()
    monkeypatch.setattr(contraction, "WEIGHT_BITS", 18)
    assert error(product(x, w), x, w) > 4 * error(x @ w.t(), x, w)


def test_the_largest_integers_of_a_weight_have_three_signed_digits() -> None:
    for value in (1.0 - 2.0**-24, 0.9846, 0.9847, 0.75, 2.0**-90 * 1.999):
        operand: Operand = weight_operand(torch.full((1, 70), value), "w")
        assert 2**21 < float(operand.integers.abs().max()) <= 127 * (1 + 256 + 65536)


def test_a_weight_that_leaves_no_room_below_the_largest_float32_is_refused() -> None:
    with pytest.raises(NumericsError, match="not finite"):
        weight_operand(torch.tensor([[1.0, 3.37e38]]), "w")


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    x = torch.ones(3, 5)
    x[1, 2] = bad
    for make in (input_operand, weight_operand):
        with pytest.raises(NumericsError, match="the tensor is not finite"):
            make(x, "the tensor")
