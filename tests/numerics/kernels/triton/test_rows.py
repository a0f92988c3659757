"""Norms, activations, gradients of weights and AdamW by Triton's kernels: against the eager code, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import products
from ppo_repro.numerics.arithmetic import elementwise, gates
from ppo_repro.numerics.arithmetic.grid import ceil_log2
from ppo_repro.numerics.layers import activations as specified
from ppo_repro.numerics.layers.norms import ExactLayerNorm, ExactRMSNorm
from ppo_repro.numerics.optim import adamw
from tests.support.cases.awkward import cases, matrix
from tests.support.integers import on_grid
from tests.support.models import seeded, unequal
from tests.support.triton_kernels import as_on_a_card, using_triton

from ppo_repro.numerics.kernels.triton import activations, gradient, norms  # isort: skip - only where Triton is

EDGES = (0.0, -0.0, 2.0**-149, -(2.0**-126), 1.0, -1.0, 0.5, 86.9, 87.1, -88.5, 103.0, -700.0, 3.4e38, -3.4e38)


def numbers() -> Tensor:
    """Edges, arguments of every size, and ties of the rounding of exp."""
    spread = torch.randn(700, generator=seeded(0)) * 10.0 ** torch.linspace(-6, 3, 700)
    halves = (torch.arange(-60, 60) + 0.5) * math.log(2.0)
    return torch.cat([torch.tensor(EDGES), spread, halves])


@pytest.mark.parametrize("backward", [False, True])
def test_silu(backward: bool) -> None:
    x = numbers()
    grad = torch.randn(len(x), generator=seeded(1))
    if backward:
        expected = x.clone().requires_grad_()
        specified.SiLU.apply(expected).backward(grad)
        with as_on_a_card():
            assert expected.grad is not None and unequal(activations.silu_gradient(grad, x), expected.grad) == 0
    else:
        with as_on_a_card():
            y = activations.silu_of(x)
        assert unequal(y, specified.silu(x)) == 0
        near = x.abs() < 80.0  # farther to the left the clamped exp ends the decay
        wide = x[near].double()
        exact = wide / (1.0 + torch.exp(-wide))
        # exp, the sum and the quotient are each rounded to float32, exp within 1e-7
        assert ((y[near].double() - exact).abs() <= exact.abs() * 3e-7 + 2.0**-149).all()


@pytest.mark.parametrize("kind", activations.KINDS, ids=lambda kind: kind.__name__)
def test_gates(kind: gates.Gate) -> None:
    x = numbers()
    grad = torch.randn(len(x), generator=seeded(1))
    with_grad = x.clone().requires_grad_()
    specified.Gated.apply(with_grad, kind).backward(grad)
    with as_on_a_card():
        assert unequal(activations.gated_of(x, kind), specified.gated(x, kind)) == 0
        assert with_grad.grad is not None
        assert unequal(activations.gated_gradient(grad, x, kind), with_grad.grad) == 0


def test_another_coefficient_of_exp_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of equal bits: the specification with one coefficient changed by 2^-20 of its size."""
    changed = (*elementwise.EXP_COEFFICIENTS[:-1], elementwise.EXP_COEFFICIENTS[-1] * (1 + 2.0**-20))
    x = numbers()
    with as_on_a_card():
        y = activations.silu_of(x)
    monkeypatch.setattr(elementwise, "EXP_COEFFICIENTS", changed)
    assert unequal(y, specified.silu(x)) > 0


def test_what_is_not_a_number_stays_so() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    with as_on_a_card():
        assert torch.equal(activations.silu_of(x).isnan(), specified.silu(x).isnan())


def check_rms_norm(case: tuple[int, int, str], m: int) -> None:
    k, seed, stride = case
    x, grad = matrix(m, k, seed, stride), matrix(m, k, seed + 1, "plain") * 2.0**-40
    norm = ExactRMSNorm(nn.Parameter(torch.randn(k, generator=seeded(seed))), 1e-6, "norm")
    own = x.clone().requires_grad_()
    expected = norm(own)
    expected.backward(grad)
    with as_on_a_card():
        y, inverse = norms.rms_normed(x, norm.factor(), 1e-6, "x")
        assert unequal(y, expected.detach()) == 0 and own.grad is not None
        assert unequal(norms.norm_gradient(grad, x, norm.factor(), None, inverse, "grad"), own.grad) == 0


@settings(max_examples=2)
@given(cases, st.integers(1, 20))
def test_rms_norm(case: tuple[int, int, str], m: int) -> None:
    check_rms_norm(case, m)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases, st.integers(1, 40))
def test_rms_norm_many(case: tuple[int, int, str], m: int) -> None:
    check_rms_norm(case, m)


def check_layer_norm(case: tuple[int, int, str], m: int) -> None:
    k, seed, stride = case
    x, grad = matrix(m, k, seed, stride), matrix(m, k, seed + 1, "plain") * 2.0**-40
    source = nn.LayerNorm(k)
    with torch.no_grad():
        source.weight.copy_(torch.randn(k, generator=seeded(seed)))
        source.bias.copy_(torch.randn(k, generator=seeded(seed + 1)))
    own = x.clone().requires_grad_()
    expected = ExactLayerNorm(source, "norm")(own)
    expected.backward(grad)
    weight, bias = source.weight.detach(), source.bias.detach()
    with as_on_a_card():
        y, mean, inverse = norms.layer_normed(x, weight, bias, source.eps, "x")
        assert unequal(y, expected.detach()) == 0 and own.grad is not None
        assert unequal(norms.norm_gradient(grad, x, weight, mean, inverse, "grad"), own.grad) == 0


@settings(max_examples=2)
@given(cases, st.integers(1, 20))
def test_layer_norm(case: tuple[int, int, str], m: int) -> None:
    check_layer_norm(case, m)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases, st.integers(1, 40))
def test_layer_norm_many(case: tuple[int, int, str], m: int) -> None:
    check_layer_norm(case, m)


def test_the_gradient_of_layer_norm_is_that_of_float64() -> None:
    x, grad = torch.randn(5, 70, generator=seeded(3)), torch.randn(5, 70, generator=seeded(4))
    weight, bias = torch.randn(70, generator=seeded(5)), torch.zeros(70)
    wide = x.double().requires_grad_()
    nn.functional.layer_norm(wide, (70,), weight.double(), bias.double()).backward(grad.double())
    with as_on_a_card():
        _, mean, inverse = norms.layer_normed(x, weight, bias, 1e-5, "x")
        dx = norms.norm_gradient(grad, x, weight, mean, inverse, "grad")
        other = norms.norm_gradient(grad, x, weight, None, inverse, "grad")
    assert wide.grad is not None
    # rounded once to float32, and terms of the two means to 2^-27 of the largest of a row
    assert ((dx.double() - wide.grad).abs() <= wide.grad.abs() * 2.0**-23 + wide.grad.abs().amax() * 2.0**-23).all()
    assert unequal(dx, other) > 0, "the control: without the mean"


def test_rows_longer_than_a_block() -> None:
    x = matrix(3, 1500, 4, "plain")
    norm = ExactRMSNorm(nn.Parameter(torch.ones(1500)), 1e-6, "norm")
    with as_on_a_card(), torch.no_grad():
        y, _ = norms.rms_normed(x, norm.factor(), 1e-6, "x")
        assert unequal(y, norm(x)) == 0 and ceil_log2(1500) == 11
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (y.double() - exact).norm() <= 2.0**-22 * exact.norm()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norms_refuse_what_is_not_finite(bad: float) -> None:
    x = torch.ones(4, 6)
    x[2, 5] = bad
    one = torch.ones(6)
    with as_on_a_card():
        for norm in (lambda: norms.rms_normed(x, one, 1e-6, "it"), lambda: norms.layer_normed(x, one, one, 1e-6, "it")):
            with pytest.raises(NumericsError, match=r"^it is not finite"):
                norm()


def check_gradient(case: tuple[int, int, str], n: int, k: int, bits: int) -> None:
    tokens, seed, stride = case
    grad, x = matrix(tokens, n, seed, stride), matrix(tokens, k, seed + 1, stride)
    (z, z_exponents), (a, a_exponents) = on_grid(grad, bits), on_grid(x, 22)
    up = torch.tensor([2.0 ** (bits - e) for e in z_exponents], dtype=torch.float64)
    x_up = torch.tensor([2.0 ** (22 - e) for e in a_exponents], dtype=torch.float64)
    expected = torch.tensor([[int(v) for v in row] for row in z.T @ a])
    before = torch.randint(-(2**40), 2**40, (n, k), generator=seeded(seed))
    for fresh, start in ((False, before), (True, torch.zeros_like(before))):
        out = before.clone()
        with as_on_a_card():
            gradient.add_products(grad, up, x, x_up, out, fresh)
        assert unequal(out, start + expected) == 0, fresh


@settings(max_examples=2)
@given(cases, st.integers(1, 20), st.integers(1, 20), st.sampled_from([20, 27]))
def test_integer_gradients(case: tuple[int, int, str], n: int, k: int, bits: int) -> None:
    check_gradient(case, n, k, bits)


@pytest.mark.parametrize("tile", [32, 64])
def test_integer_gradients_by_tiles_of_every_card(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient, "rows_of_a_tile", lambda x: tile)
    check_gradient((5, 3, "plain"), 40, 9, 27)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases, st.integers(1, 80), st.integers(1, 80), st.sampled_from([20, 23, 27]))
def test_integer_gradients_many(case: tuple[int, int, str], n: int, k: int, bits: int) -> None:
    check_gradient(case, n, k, bits)


@pytest.mark.slow
def test_gradients_of_more_tokens_than_an_int32_sum_holds() -> None:
    tokens = 33_000
    grad, x = torch.full((tokens, 1), 2.0**20 - 1), torch.full((tokens, 1), -(2.0**20) + 1)
    one, out = torch.ones(tokens, dtype=torch.float64), torch.full((1, 1), 7)
    with as_on_a_card():
        gradient.add_products(grad, one * 4, x, one, out, True)
    assert out.item() == -tokens * 4 * (2**20 - 1) ** 2


@settings(max_examples=2)
@given(cases, st.integers(1, 20), st.sampled_from([torch.float32, torch.float64]))
def test_row_exponents(case: tuple[int, int, str], m: int, dtype: torch.dtype) -> None:
    k, seed, stride = case
    x = matrix(m, k, seed, stride).to(dtype)
    expected, got = products.row_exponents(x), gradient.row_exponents(x)
    assert expected is not None and got is not None and torch.equal(got, expected)
    x = x.clone()
    x[m - 1, k - 1] = math.nan
    assert gradient.row_exponents(x) is None


@settings(max_examples=3)
@given(cases, st.integers(1, 90), st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_integer_rows(case: tuple[int, int, str], n: int, dtype: torch.dtype, by_id: bool) -> None:
    """Rows that fit are added, at the same ids several times; those beyond the grid are not."""
    tokens, seed, stride = case
    x = matrix(tokens, n, seed, stride).to(dtype)
    exponents = products.row_exponents(x)
    assert exponents is not None
    limit = int(exponents.max()) - seed % 2
    ids = torch.randint(0, 3, (tokens,), generator=seeded(seed)) if by_id else None
    before = torch.randint(-(2**40), 2**40, (4, n) if by_id else (n,), generator=seeded(seed))
    expected, got = before.clone(), before.clone()
    products.add_integer_rows(x, exponents, limit, 49 - limit, ids, expected)
    with using_triton():
        products.add_integer_rows(x, exponents, limit, 49 - limit, ids, got)
        assert unequal(got, expected) == 0
    in_integers = [[0] * n for _ in range(4)]
    for t, row in enumerate(x.tolist()):
        for k, value in enumerate(row if exponents[t] <= limit else []):
            in_integers[0 if ids is None else int(ids[t])][k] += round(math.ldexp(value, 49 - limit))
    assert ((got - before).view(-1, n) == torch.tensor(in_integers if by_id else in_integers[:1])).all()


def test_integer_rows_on_another_grid_are_found() -> None:
    x, out = torch.randn(5, 7, generator=seeded(0)), [torch.zeros(7, dtype=torch.int64) for _ in range(2)]
    exponents = products.row_exponents(x)
    assert exponents is not None
    with using_triton():
        for sums, shift in zip(out, (40, 39), strict=True):
            products.add_integer_rows(x, exponents, 9, shift, None, sums)
    assert unequal(*out) == 7 and (out[0] - 2 * out[1]).abs().max() <= 10


@pytest.mark.parametrize("count", [1, 1024, 2500])
def test_the_norm_of_a_gradient(count: int) -> None:
    x = torch.randn(count, generator=seeded(count)) * 10.0 ** torch.linspace(-9, 3, count)
    expected = adamw.exact_norms([x, x[:1] * 0.0, -x])
    with using_triton():
        assert adamw.exact_norms([x, x[:1] * 0.0, -x]) == expected
        assert adamw.exact_norms([x, x[:1] * 0.0, -x * 1.0001]) != expected, "the control"
    exact = math.sqrt(2.0) * float(x.double().norm())
    assert abs(expected[0] - exact) <= 2.0**-20 * exact


def test_adamw() -> None:
    settings_ = adamw.AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.01, 1.0)
    results = []
    for triton_is_used in (False, True):
        parameters = {"w": torch.randn(37, 31, generator=seeded(0)), "b": torch.randn(5, generator=seeded(1))}
        optimizer = adamw.ExactAdamW(parameters)
        for step in range(3):
            gradients = {n: torch.randn(p.shape, generator=seeded(9 + step)) for n, p in parameters.items()}
            if triton_is_used:
                with using_triton():
                    optimizer.apply(settings_, gradients, 2.5)
            else:
                optimizer.apply(settings_, gradients, 2.5)
        results.append([*parameters.values(), *optimizer.first.values(), *optimizer.second.values()])
    assert all(unequal(a, b) == 0 for a, b in zip(*results, strict=True))
    assert unequal(results[0][0], torch.randn(37, 31, generator=seeded(0))) > 0
