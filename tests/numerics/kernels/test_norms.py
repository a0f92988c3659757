"""Layer norm and Gemma's norm by kernels: bit for bit the eager specification, with the same refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.layers.linear import ExactModule
from ppo_repro.numerics.layers.norms import ExactGemmaRMSNorm, ExactLayerNorm
from tests.support.cases.awkward import cases, matrix
from tests.support.cases.norms import NORMS, norm_of, normed, trained
from tests.support.in_order import sum_in_order
from tests.support.kernels import both, outcome, threads, using
from tests.support.models import seeded

Case = tuple[int, int, str]
PARAMETERS = ("normal", "zeros", "signed zeros")
# of the grid from the largest contribution: no grid yet, and both ends of the window
OFFSETS = (None, -5, -4, 0, 4, 5)


def check(kind: str, case: Case, rows: int, count: int, parameters: str, offset: int | None) -> None:
    size, seed, stride = case
    x, upstream = matrix(rows, size, seed, stride), matrix(rows, size, seed + 1, stride)
    norm = trained(norm_of(kind, size, seed, parameters))
    expected, got = both(lambda: normed(norm, x, upstream, offset), count)
    assert expected != "refused" and got == expected


STRATEGIES = (cases, st.integers(1, 40), threads, st.sampled_from(PARAMETERS), st.sampled_from(OFFSETS))


@pytest.mark.parametrize("kind", NORMS)
@settings(max_examples=80)
@given(*STRATEGIES)
def test_norms_are_the_specification(
    kind: str, case: Case, rows: int, count: int, parameters: str, offset: int | None
) -> None:
    check(kind, case, rows, count, parameters, offset)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", NORMS)
@settings(max_examples=1_500)
@given(*STRATEGIES)
def test_norms_are_the_specification_many(
    kind: str, case: Case, rows: int, count: int, parameters: str, offset: int | None
) -> None:
    check(kind, case, rows, count, parameters, offset)


@pytest.mark.parametrize("kind", NORMS)
def test_a_frozen_norm_passes_the_gradient_on(kind: str) -> None:
    x, upstream = torch.randn(3, 7, 40, generator=seeded(0)), torch.randn(3, 7, 40, generator=seeded(1))
    norm = norm_of(kind, 40, 2)
    expected, got = both(lambda: normed(norm, x, upstream), 2)
    assert got == expected and len(expected) == 3


def refusal(name: str, norm: ExactModule, x: Tensor, upstream: Tensor) -> str:
    with using(name), pytest.raises(NumericsError) as refused:
        normed(norm, x, upstream)
    return str(refused.value)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", NORMS)
def test_numbers_that_are_not_finite_are_refused_in_the_same_words(kind: str, bad: float) -> None:
    norm, whole, broken = trained(norm_of(kind, 9, 0)), torch.ones(5, 9), torch.ones(5, 9)
    broken[4, 8] = bad
    for x, upstream, words in ((broken, whole, "the input of norm"), (whole, broken, "the gradient of a norm")):
        messages = {refusal(name, norm, x, upstream) for name in ("eager", "float64")}
        assert messages == {f"{words} is not finite; lower the learning rate or check the weights"}


@pytest.mark.parametrize("kind", NORMS)
def test_zeros_without_an_epsilon_have_no_gradient(kind: str) -> None:
    norm, x = trained(norm_of(kind, 6, 0, eps=0.0)), torch.zeros(2, 6)
    messages = {refusal(name, norm, x, torch.ones(2, 6)) for name in ("eager", "float64")}
    assert messages == {"the gradient of a norm is not finite; lower the learning rate or check the weights"}


def test_by_hand() -> None:
    # mean 4, deviations -3 -1 1 3, variance 5; with eps 20: inverse 1/5
    source = nn.LayerNorm(4, eps=20.0)
    with torch.no_grad():
        source.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        source.bias.fill_(0.5)
    layer = trained(ExactLayerNorm(source, "norm"))
    # mean square 4, with eps 12: inverse 1/4; factors 1 + w
    gemma = trained(ExactGemmaRMSNorm(nn.Parameter(torch.tensor([0.0, 1.0, -1.0, 3.0])), 12.0, "norm"))
    with using("float64"):
        y, _, dx, _, weight, bias = normed(layer, torch.tensor([[1.0, 3.0, 5.0, 7.0]]), torch.tensor([[5.0, 0, 0, 0]]))
        assert y[0].tolist() == pytest.approx([-0.1, 0.1, 1.1, 2.9], abs=1e-6)
        # w dy = 5 0 0 0, its mean 1.25, mean(w dy n) = -0.75: (5 - 1.25 - 0.45) / 5, (-1.25 - 0.15) / 5, ...
        assert dx[0].tolist() == pytest.approx([0.66, -0.28, -0.22, -0.16], abs=1e-6)
        # dw = dy n = -3 and db = 5, with 49 bits below 2^2 and 2^3 and 3 bits of headroom
        assert [float(weight[0]) / 2.0**44, float(bias[0]) / 2.0**43] == pytest.approx([-3.0, 5.0], rel=1e-9)
        y, _, dx, _, weight = normed(gemma, torch.tensor([[2.0, -2.0, 2.0, -2.0]]), torch.tensor([[8.0, 0, 0, 0]]))
        assert y[0].tolist() == [0.5, -1.0, 0.0, -2.0]
        # w dy = 8 0 0 0 and n = 1/2 -1/2 1/2 -1/2: mean(w dy n) = 1; (8 - 1/2) / 4, (1/2) / 4, ...
        assert dx[0].tolist() == [1.875, 0.125, -0.125, 0.125]
        assert weight.tolist() == [4 << 43, 0, 0, 0]


def test_another_order_of_operations_would_be_seen() -> None:
    """The negative control: a layer norm whose sums are rounded term by term, on the same rows."""
    x = matrix(20, 100, 0, "plain")
    norm = norm_of("layer norm", 100, 0)
    with using("float64"), torch.no_grad():
        exact = outcome(lambda: [norm(x)])
        mean = sum_in_order(x, 1)[:, None] / 100
        variance = sum_in_order((x - mean) ** 2, 1)[:, None] / 100
        in_order = outcome(lambda: [(x - mean) / torch.sqrt(variance + 1e-6) * norm.weight + norm.bias])
    assert in_order != exact
