"""k1, k2, k3: worked cases, definitions, gradients, ends, and exact expectations over whole distributions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.ppo import kl
from tests.support.float32 import finite, lists, tensor

LN2 = 0.6931471805599453


def series(x: float, first: int) -> Fraction:
    """sum over n >= first of x^n / n!, in rationals; 30 terms are exact to 1e-33 for |x| <= 1."""
    return sum((Fraction(x) ** n / math.factorial(n) for n in range(first, 32)), Fraction(0))


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


@given(finite(-1.0, 1.0))
def test_k3_of_a_small_ratio_has_its_relative_accuracy(x: float) -> None:
    exact = series(-x, 2)
    found = kl.k3(tensor([x])).item()
    # roundings of the Horner steps, whose terms shrink at least threefold, and three products: below 8 * 2^-52.
    # The series stops at x^16/16!: the first term left out is 2 |x|^15 / 17! of x^2/2, and k3 >= 0.73 x^2/2
    left_out = Fraction(2, math.factorial(17)) * abs(Fraction(x)) ** 15 / Fraction(73, 100)
    assert abs(Fraction(found) - exact) <= exact * (8 * Fraction(2) ** -52 + left_out * Fraction(11, 10))


@given(st.one_of(finite(-1.0, 1.0), st.sampled_from([1e-3, -1e-5, 1e-7, -1e-8, 1e-20, 2.0**-149, 0.0])))
def test_k3s_gradient_of_a_small_ratio_has_its_relative_accuracy(x: float) -> None:
    log_ratios = tensor([x]).requires_grad_()
    (found,) = torch.autograd.grad(kl.k3_loss(log_ratios), log_ratios)
    exact = -series(-log_ratios.item(), 1)  # 1 - exp(-x)
    assert abs(Fraction(found.item()) - exact) <= abs(exact) * Fraction(2) ** -23 + Fraction(2) ** -149


@pytest.mark.parametrize("x", [1e-7, -1e-8, 1e-20])
def test_the_textbooks_gradient_of_k3_has_lost_its_digits(x: float) -> None:
    """The control: 1 - exp(-x) in float32."""
    textbook, exact = (1.0 - torch.exp(-tensor([x]))).item(), -math.expm1(-x)
    assert abs(textbook - exact) > 0.01 * abs(exact)


@given(lists(-1e30, 1e30))
def test_no_estimate_of_k2_or_k3_is_negative_and_k3_is_zero_for_equal_probabilities_alone(x: list[float]) -> None:
    assert bool((kl.k2(tensor(x)) >= 0).all())
    assert bool((kl.reverse_k3(tensor(x)) >= 0).all())
    assert (kl.k3(tensor(x)) > 0).tolist() == [v != 0 for v in x]


def test_the_ends() -> None:
    """Float32 overflows at 88.7: there the estimators are monotone and near their limits, and no digit is lost."""
    x = [-math.inf, -1e30, -100.0, -87.0, 87.0, 89.0, 100.0, 1e30, math.inf]
    k3, reverse = kl.k3(tensor(x)).tolist(), kl.reverse_k3(tensor(x)).tolist()
    assert k3[0] >= k3[1] >= k3[2] >= k3[3] == pytest.approx(math.exp(87) - 1 - 87, rel=1e-6)
    assert k3[4:8] == pytest.approx([v - 1 for v in x[4:8]], rel=1e-7)
    assert k3[8] >= k3[7]
    assert reverse[4:] == pytest.approx([1.0] * 5, abs=1e-30)  # rho log rho - rho + 1 with rho = exp(-x)
    assert reverse[3] == pytest.approx(math.exp(87) * 86 + 1, rel=1e-6)
    assert min(reverse[:3]) >= reverse[3]
    ends = tensor(x[3:8]).requires_grad_()
    (found,) = torch.autograd.grad(kl.k3_loss(ends).sum(), ends)
    assert found.tolist() == pytest.approx([-math.expm1(87), 1.0, 1.0, 1.0, 1.0], rel=1e-6)
