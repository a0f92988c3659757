"""Contractions and integer gradients: every backend against Python's integers, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.linear import ExactLinear
from ppo_repro.numerics.products import NOTHING, PreparedWeight, add_products, row_exponents
from tests.support.cases.awkward import cases, matrix
from tests.support.integers import exponents, linear, on_grid
from tests.support.models import seeded, unequal

BACKENDS = [name for name in backend.BACKENDS if name != "amx" or backend.has_amx()]
SIZES = st.integers(1, 20)
THREADS = st.integers(1, 3)


def check_contraction(case: tuple[int, int, str], m: int, n: int, threads: int) -> None:
    k, seed, stride = case
    x, w = matrix(m, k, seed, stride), matrix(n, k, seed + 1, stride)
    bias = torch.randn(n, generator=seeded(seed))
    expected = linear(x, w)
    for name in BACKENDS:
        backend.use(name, threads)
        prepared = PreparedWeight("w")
        assert unequal(prepared.contract(x, w, 1), expected) == 0, name
        assert unequal(prepared.contract(x, w.t(), 0), expected) == 0, name
        assert unequal(prepared.contract(x, w, 1, bias), linear(x, w, bias)) == 0, name


@settings(max_examples=150)
@given(cases, SIZES, SIZES, THREADS)
def test_contractions_equal_integer_arithmetic(case: tuple[int, int, str], m: int, n: int, t: int) -> None:
    check_contraction(case, m, n, t)


@pytest.mark.long
@pytest.mark.timeout(3000)
@settings(max_examples=6_000)
@given(cases, st.integers(1, 6), st.integers(1, 6), THREADS)
def test_contractions_equal_integer_arithmetic_many(case: tuple[int, int, str], m: int, n: int, t: int) -> None:
    check_contraction(case, m, n, t)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 256, 1024), (70, 300, 130), (33, 4864, 40), (200, 64, 48)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_contractions_equal_the_reference_in_parts(m: int, k: int, n: int, threads: int) -> None:
    x, w = (torch.randn(rows, k, generator=seeded(rows)) for rows in (m, n))
    products, sums = [], []
    for name in BACKENDS:
        backend.use(name, threads)
        products += [
            PreparedWeight("w").contract(x, w, 1),
            PreparedWeight("w").contract(x, w.t().contiguous(), 0),
        ]
        one = torch.ones(k, dtype=torch.float64)
        sums.append(torch.zeros(n, m, dtype=torch.int64))
        add_products(w.t().contiguous(), one * 2**18, 21, x.t().contiguous(), one * 2**14, 17, sums[-1], False)
    assert all(unequal(products[0], other) == 0 for other in products[1:])
    assert all(unequal(sums[0], other) == 0 for other in sums[1:])
    reference = x.double() @ w.double().t()
    # a weight is rounded to 2^-24 of the largest of its row, which is about four times the others
    assert float((products[0].double() - reference).norm() / reference.norm()) < 2.0**-22
    assert unequal(x @ w.t(), reference.float()) > 0, "float32 sums round, so equality means something"


@settings(max_examples=30)
@given(cases, SIZES, THREADS)
def test_a_changed_weight_is_packed_into_the_memory_of_the_old_one(
    case: tuple[int, int, str], n: int, threads: int
) -> None:
    k, seed, stride = case
    x, w, other = matrix(5, k, seed, stride), matrix(n, k, seed + 1, stride), matrix(n, k, seed + 2, stride)
    for name in BACKENDS:
        backend.use(name, threads)
        for dim in (0, 1):
            prepared, weight = PreparedWeight("w"), (w if dim else w.t()).contiguous().clone()
            prepared.contract(x, weight, dim)
            weight.copy_(other if dim else other.t())
            assert unequal(prepared.contract(x, weight, dim), linear(x, other)) == 0, (name, dim)


def check_gradient(case: tuple[int, int, str], n: int, k: int, bits: int, x_bits: int, threads: int) -> None:
    tokens, seed, stride = case
    grad, x = matrix(tokens, n, seed, stride), matrix(tokens, k, seed + 1, stride)
    up = torch.tensor([2.0 ** (bits - e) for e in exponents(grad)], dtype=torch.float64)
    x_up = torch.tensor([2.0 ** (x_bits - e) for e in exponents(x)], dtype=torch.float64)
    before = torch.randint(-(2**40), 2**40, (n, k), generator=seeded(seed))
    z, a = on_grid(grad, bits)[0], on_grid(x, x_bits)[0]
    products = torch.tensor((z.T @ a).astype(np.int64))
    for name in BACKENDS:
        backend.use(name, threads)
        for fresh, expected in ((False, before + products), (True, products)):
            out = before.clone()
            add_products(grad, up, bits, x, x_up, x_bits, out, fresh)
            assert unequal(out, expected) == 0, (name, fresh)


@settings(max_examples=100)
@given(cases, SIZES, SIZES, st.sampled_from([20, 22, 23, 27]), st.sampled_from([14, 22]), THREADS)
def test_integer_gradients_equal_integer_arithmetic(
    case: tuple[int, int, str], n: int, k: int, bits: int, x_bits: int, t: int
) -> None:
    check_gradient(case, n, k, bits, x_bits, t)


@pytest.mark.long
@pytest.mark.timeout(3000)
@settings(max_examples=2_000)
@given(cases, st.integers(1, 6), st.integers(1, 6), st.sampled_from([20, 22, 27]), st.sampled_from([14, 22]), THREADS)
def test_integer_gradients_equal_integer_arithmetic_many(
    case: tuple[int, int, str], n: int, k: int, bits: int, x_bits: int, t: int
) -> None:
    check_gradient(case, n, k, bits, x_bits, t)


def test_gradients_of_more_tokens_than_an_int32_sum_holds_are_exact() -> None:
    tokens = 33_000
    grad, x = torch.full((tokens, 1), 2.0**20 - 1), torch.full((tokens, 1), -(2.0**20) + 1)
    one = torch.ones(tokens, dtype=torch.float64)
    for name in BACKENDS:
        backend.use(name, 1)
        out = torch.full((1, 1), 7)
        add_products(grad, one * 4, 22, x, one, 20, out, True)
        assert out.item() == -tokens * 4 * (2**20 - 1) ** 2, name


@settings(max_examples=100)
@given(cases, SIZES)
def test_row_exponents_are_those_of_the_definition(case: tuple[int, int, str], m: int) -> None:
    k, seed, stride = case
    x = matrix(m, k, seed, stride)
    dead = (x == 0).all(-1).tolist()
    expected = [NOTHING if zero else e for zero, e in zip(dead, exponents(x), strict=True)]
    for name in BACKENDS:
        backend.use(name, 1)
        got = row_exponents(x)
        assert got is not None and got.tolist() == expected, name


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", BACKENDS)
def test_numbers_that_are_not_finite_are_refused_by_the_name_of_the_module(name: str, bad: float) -> None:
    backend.use(name, 1)
    layer = ExactLinear(nn.Linear(40, 20), "layers.3.mlp")
    layer.accumulator = GradientAccumulator(layer.named_parameters())
    for row, column in ((0, 0), (17, 39), (18, 20)):
        x = torch.ones(19, 40)
        x[row, column] = bad
        with pytest.raises(NumericsError, match=r"layers\.3\.mlp is not finite"):
            layer(x)
    y = layer(torch.ones(19, 40, requires_grad=True))
    upstream = torch.ones(19, 20)
    upstream[18, 19] = bad
    with pytest.raises(NumericsError, match="not finite"):
        y.backward(upstream)
    with torch.no_grad():
        layer.weight[3, 7] = bad
    with pytest.raises(NumericsError, match="not finite"):
        layer(torch.ones(1, 40))
