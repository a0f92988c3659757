"""Norms, activations and row sums: kernels equal the eager reference bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.activations import SiLU
from ppo_repro.numerics.layers.norms import ExactRMSNorm
from tests.support.cases.awkward import cases, matrix
from tests.support.models import seeded, unequal

Case = tuple[int, int, str]
Normed = tuple[Tensor, Tensor, dict[str, Tensor] | None, dict[str, int]]


def normed(name: str, threads: int, x: Tensor, upstream: Tensor, weight: Tensor, grid: int | None) -> Normed:
    """Output, input gradient, weight gradient and grids of a norm, after one step or its calibration."""
    backend.use(name, threads)
    norm = ExactRMSNorm(nn.Parameter(weight.clone()), 1e-6, "norm")
    accumulator = norm.accumulator = GradientAccumulator(norm.named_parameters())
    if grid is not None:
        accumulator.grids["weight"] = grid
    leaf = x.detach().clone().requires_grad_()
    y = norm(leaf)
    y.backward(upstream)
    assert leaf.grad is not None
    return y.detach(), leaf.grad, accumulator.finish(), accumulator.grids


def check_norm(case: Case, rows: int, threads: int, offset: int | None) -> None:
    size, seed, stride = case
    x, upstream = matrix(rows, size, seed, stride), matrix(rows, size, seed + 1, stride)
    weight = torch.randn(size, generator=seeded(seed))
    calibrated = normed("eager", 1, x, upstream, weight, None)[3]
    grid = None if offset is None or not calibrated else calibrated["weight"] + offset
    expected = normed("eager", 1, x, upstream, weight, grid)
    got = normed("float64", threads, x, upstream, weight, grid)
    assert unequal(got[0], expected[0]) == 0 and unequal(got[1], expected[1]) == 0
    assert got[3] == expected[3] and (got[2] is None) == (expected[2] is None)
    if got[2] is not None and expected[2] is not None:
        assert unequal(got[2]["weight"], expected[2]["weight"]) == 0


OFFSETS = st.sampled_from([None, -5, -4, 0, 4, 5])


@settings(max_examples=100)
@given(cases, st.integers(1, 40), st.integers(1, 3), OFFSETS)
def test_the_norm_is_the_reference(case: Case, rows: int, threads: int, offset: int | None) -> None:
    check_norm(case, rows, threads, offset)


@pytest.mark.long
@pytest.mark.timeout(3000)
@settings(max_examples=1_500)
@given(cases, st.integers(1, 8), st.integers(1, 3), OFFSETS)
def test_the_norm_is_the_reference_many(case: Case, rows: int, threads: int, offset: int | None) -> None:
    check_norm(case, rows, threads, offset)


def test_the_norm_is_accurate_and_float32_would_not_be_equal() -> None:
    x, upstream = (torch.randn(400, 300, generator=seeded(s)) for s in (0, 1))
    weight = torch.randn(300, generator=seeded(2))
    y, dx, _, _ = normed("float64", 2, x, upstream, weight, None)
    leaf = x.double().requires_grad_()
    reference = leaf / (leaf.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    reference.backward(upstream.double())
    assert leaf.grad is not None
    # with grids of 26 bits under the mean and the dot product, the rounding of the result to float32 remains
    assert torch.allclose(y.double(), reference.detach(), rtol=1.01 * 2.0**-24, atol=0)
    assert float((dx.double() - leaf.grad).norm() / leaf.grad.norm()) < 4e-8
    assert unequal(nn.functional.rms_norm(x, (300,), weight, 1e-6), y) > 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["eager", "float64"])
def test_a_norm_of_numbers_that_are_not_finite_is_refused_by_name(name: str, bad: float) -> None:
    x, weight = torch.ones(5, 9), torch.ones(9)
    x[4, 8] = bad
    with pytest.raises(NumericsError, match="the input of norm is not finite"):
        normed(name, 1, x, torch.ones(5, 9), weight, None)
    with pytest.raises(NumericsError, match="the gradient of a norm is not finite"):
        normed(name, 1, torch.ones(5, 9), x, weight, None)


def silu(name: str, threads: int, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    backend.use(name, threads)
    leaf = x.detach().requires_grad_()
    y = SiLU.apply(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, upstream)[0]


def check_silu(case: Case, rows: int, threads: int) -> None:
    size, seed, stride = case
    x, upstream = matrix(rows, size, seed, stride), matrix(rows, size, seed + 1, stride)
    for got, expected in zip(silu("float64", threads, x, upstream), silu("eager", 1, x, upstream), strict=True):
        assert unequal(got, expected) == 0


@settings(max_examples=100)
@given(cases, st.integers(1, 40), st.integers(1, 3))
def test_silu_is_the_reference(case: Case, rows: int, threads: int) -> None:
    check_silu(case, rows, threads)


@pytest.mark.long
@pytest.mark.timeout(3000)
@settings(max_examples=1_500)
@given(cases, st.integers(1, 8), st.integers(1, 3))
def test_silu_is_the_reference_many(case: Case, rows: int, threads: int) -> None:
    check_silu(case, rows, threads)


def added(name: str, x: Tensor, ids: Tensor | None, shape: tuple[int, ...], grid: int | None) -> GradientAccumulator:
    backend.use(name, 1)
    parameter = torch.zeros(shape)
    accumulator = GradientAccumulator([("p", parameter)])
    if grid is not None:
        accumulator.grids["p"] = grid
    accumulator.add_rows(parameter, x, ids)
    return accumulator


def check_rows(case: Case, rows: int, embedding: bool, offset: int | None) -> None:
    size, seed, stride = case
    x = matrix(rows, size, seed, stride)
    ids = torch.randint(0, 7, (rows,), generator=seeded(seed)) if embedding else None
    shape = (7, size) if embedding else (size,)
    largest = added("eager", x, ids, shape, None).largest
    grid = None if offset is None or not largest else largest["p"] + offset
    expected, got = added("eager", x, ids, shape, grid), added("float64", x, ids, shape, grid)
    assert got.largest == expected.largest == largest
    # beyond the grid the sums are not used: the step is redone
    if grid is not None and offset is not None and offset >= -4:
        assert unequal(got.sums["p"], expected.sums["p"]) == 0


@settings(max_examples=100)
@given(cases, st.integers(1, 40), st.booleans(), OFFSETS)
def test_sums_of_rows_are_the_reference(case: Case, rows: int, embedding: bool, offset: int | None) -> None:
    check_rows(case, rows, embedding, offset)


@pytest.mark.long
@pytest.mark.timeout(3000)
@settings(max_examples=1_500)
@given(cases, st.integers(1, 12), st.booleans(), OFFSETS)
def test_sums_of_rows_are_the_reference_many(case: Case, rows: int, embedding: bool, offset: int | None) -> None:
    check_rows(case, rows, embedding, offset)
