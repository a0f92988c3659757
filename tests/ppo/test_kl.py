"""k1, k2, k3: worked cases, definitions, and exact expectations over whole distributions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.ppo import kl
from tests.support.float32 import bits, finite, lists, pairs_of_categoricals, tensor

LN2 = 0.6931471805599453


def divergence(p: list[float], q: list[float]) -> float:
    """KL(p || q) from its definition."""
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def log_ratio(p: list[float], q: list[float]) -> torch.Tensor:
    return torch.tensor([math.log(a) - math.log(b) for a, b in zip(p, q, strict=True)], dtype=torch.float64)


def expectation(p: list[float], values: torch.Tensor) -> float:
    return math.fsum(a * v for a, v in zip(p, values.tolist(), strict=True))


def k3_series(x: float) -> Fraction:
    """exp(-x) - 1 + x = sum over n >= 2 of (-x)^n / n!, in rationals; 30 terms are exact to 1e-33 for |x| <= 1."""
    return sum((Fraction(-x) ** n / math.factorial(n) for n in range(2, 32)), Fraction(0))


@pytest.mark.parametrize(
    ("kind", "expected"),
    # log-ratios ln 2, -ln 2, ln 4, -ln 4: the policy makes the token 2, 1/2, 4, 1/4 times as likely as the other
    [
        ("k1", [LN2, -LN2, 2 * LN2, -2 * LN2]),
        ("k2", [LN2**2 / 2, LN2**2 / 2, 2 * LN2**2, 2 * LN2**2]),
        ("k3", [1 / 2 - 1 + LN2, 2 - 1 - LN2, 1 / 4 - 1 + 2 * LN2, 4 - 1 - 2 * LN2]),
    ],
)
def test_worked_case(kind: str, expected: list[float]) -> None:
    found = kl.estimate(kind, tensor([LN2, -LN2, 2 * LN2, -2 * LN2]))
    # the float32 argument is off by up to 6e-8 relative, which |slope| <= 3 turns into less than 3e-7
    assert found.tolist() == pytest.approx(expected, abs=3e-7)


def test_a_worked_expectation_shows_that_k2_is_biased_and_the_others_are_not() -> None:
    p, q = [0.75, 0.25], [0.25, 0.75]
    x = log_ratio(p, q)
    exact = 0.5 * math.log(3)  # 3/4 ln 3 - 1/4 ln 3
    assert expectation(p, kl.k1(x)) == pytest.approx(exact, abs=1e-15)
    # the exponential of k3 has a relative error of 1e-7 for |x| > 1
    assert expectation(p, kl.k3(x)) == pytest.approx(exact, abs=3e-7)
    assert expectation(p, kl.k2(x)) == pytest.approx(0.5 * math.log(3) ** 2, abs=1e-15)
    assert 0.5 * math.log(3) ** 2 > exact + 0.05


@given(finite(-1.0, 1.0))
def test_k3_of_a_small_ratio_keeps_its_relative_accuracy(x: float) -> None:
    exact = k3_series(x)
    found = kl.k3(tensor([x])).item()
    # roundings of the Horner steps, whose terms shrink at least threefold, and three products: below 8 * 2^-52.
    # The series stops at x^16/16!: the first term left out is 2 |x|^15 / 17! of x^2/2, and k3 >= 0.73 x^2/2
    left_out = Fraction(2, math.factorial(17)) * abs(Fraction(x)) ** 15 / Fraction(73, 100)
    assert abs(Fraction(found) - exact) <= exact * (8 * Fraction(2) ** -52 + left_out * Fraction(11, 10))


@pytest.mark.parametrize("x", [1e-3, -1e-5, 1e-6, -1e-8, 1e-20, 2.0**-149])
def test_k3_where_the_textbook_formula_has_lost_every_digit(x: float) -> None:
    x = tensor([x]).item()
    found = kl.k3(tensor([x])).item()
    # x^2/2 is the first term; the next one is x/3 of it
    assert found == pytest.approx(x * x / 2, rel=abs(x) / 3 + 1e-15) and found > 0
    textbook = (torch.exp(-tensor([x])) - 1 + tensor([x])).item()
    assert abs(textbook - found) > found / 100


@given(finite(-87.0, 87.0))
def test_k3_agrees_with_expm1_of_the_library(x: float) -> None:
    found = kl.k3(tensor([x])).item()
    # expm1(-x) + x cancels to an absolute error of |x| 2^-52; the float32 exponential is off by 1e-7 of exp(-x)
    # and for |x| <= 1 the series of k3 to 8e-15, as above
    tolerance = 3 * abs(x) * 2.0**-52 + (1e-7 * math.exp(-x) if abs(x) > 1 else 8e-15 * x * x)
    assert abs(found - (math.expm1(-x) + x)) <= tolerance


@given(finite(-87.0, 87.0))
def test_k3_minus_k1_is_expm1_of_the_negative_log_ratio(x: float) -> None:
    one = tensor([x])
    difference = kl.k3(one).item() - kl.k1(one).item()
    # as above, and one more float64 rounding of a number below |x| + exp(-x)
    tolerance = 6 * abs(x) * 2.0**-52 + (1e-7 * math.exp(-x) if abs(x) > 1 else 8e-15 * x * x)
    assert abs(difference - math.expm1(-x)) <= tolerance


@given(lists(-1e30, 1e30))  # beyond, exp(88), where the exponential saturates, is small against x itself
def test_k2_is_never_negative_and_k3_is_zero_for_equal_probabilities_alone(x: list[float]) -> None:
    k2, k3 = kl.k2(tensor(x)), kl.k3(tensor(x))
    assert bool((k2 >= 0).all())
    assert (k3 > 0).tolist() == [v != 0 for v in x]


@given(lists())
def test_estimates_follow_their_definitions_bit_for_bit_where_those_have_one_rounding_order(x: list[float]) -> None:
    assert bits(kl.k1(tensor(x))) == bits(tensor(x))
    squares = [float(tensor([v]) * tensor([v])) for v in x]
    assert bits(kl.k2(tensor(x))) == bits(tensor(squares) * 0.5)


@given(pairs_of_categoricals())
def test_k1_and_k3_have_the_divergence_as_their_expectation(pair: tuple[list[float], list[float]]) -> None:
    p, q = pair
    x = log_ratio(p, q)
    exact = divergence(p, q)
    assert exact >= -1e-15
    assert expectation(p, kl.k1(x)) == pytest.approx(exact, abs=1e-13)  # a few float64 roundings
    # sum p (q/p) = 1 times the error of the float32 exponential: 1e-7, and 2^-24 |x| of its argument, |x| < 10
    assert expectation(p, kl.k3(x)) == pytest.approx(exact, abs=8e-7)


@given(pairs_of_categoricals())
def test_equal_distributions_give_exactly_zero(pair: tuple[list[float], list[float]]) -> None:
    p, _ = pair
    for kind in ("k1", "k2", "k3"):
        assert kl.estimate(kind, log_ratio(p, p)).tolist() == [0.0] * len(p)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=1, max_size=12))
def test_the_sum_of_k1_over_a_response_is_the_log_ratio_of_the_whole_response(percents: list[tuple[int, int]]) -> None:
    x = torch.tensor([math.log(a / 100) - math.log(b / 100) for a, b in percents], dtype=torch.float64)
    whole_p = math.prod(Fraction(a, 100) for a, _ in percents)
    whole_q = math.prod(Fraction(b, 100) for _, b in percents)
    # 12 float64 logarithms below 5, each with an error of 2^-51
    assert math.fsum(kl.k1(x).tolist()) == pytest.approx(math.log(whole_p / whole_q), abs=1e-13)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_estimate_is_float32_in_the_shape_of_its_input(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = kl.estimate(kind, torch.ones(shape, dtype=dtype))
    assert found.shape == shape and found.dtype == torch.float32


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(KeyError, match="k4"):
        kl.estimate("k4", torch.zeros(1))
