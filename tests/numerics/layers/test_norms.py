"""Layer norm, Gemma's norm, transposed linear layers: exact sums, the values and gradients of float64."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.pytorch_utils import Conv1D

from ppo_repro.numerics.arithmetic.grid import quantise
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.linear import ExactConv1D, ExactLinear, ExactModule
from ppo_repro.numerics.layers.norms import ExactGemmaRMSNorm, ExactLayerNorm, row_dot, row_mean, row_mean_square
from tests.support.in_order import sum_in_order
from tests.support.models import seeded, unequal

WIDTH = 96
KINDS = ("layer norm", "gemma", "conv1d")


def stock(kind: str) -> nn.Module:
    """A stock module with random parameters."""
    module: nn.Module
    if kind == "layer norm":
        module = nn.LayerNorm(WIDTH, eps=1e-5)
    elif kind == "gemma":
        module = GemmaRMSNorm(WIDTH, eps=1e-6)
    else:
        module = Conv1D(40, WIDTH)
    generator = seeded(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def exact(kind: str) -> ExactModule:
    source = stock(kind)
    if isinstance(source, nn.LayerNorm):
        return ExactLayerNorm(source, "norm")
    return ExactGemmaRMSNorm(source.weight, source.eps, "norm") if kind == "gemma" else ExactConv1D(source, "layer")


def rows(count: int, seed: int) -> Tensor:
    """Rows of many sizes; an offset and outliers, as hidden states have."""
    generator = seeded(seed)
    x = torch.randn(count, WIDTH, generator=generator) + 3.0
    x[:, 5] *= 200.0
    return x * 2.0 ** torch.randint(-12, 8, (count, 1), generator=generator)


def gradients(kind: str, x: Tensor, upstream: Tensor, split: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, input gradient and parameter gradients, `split` rows at a time."""
    module = exact(kind)
    accumulator = GradientAccumulator(module.named_parameters())
    module.accumulator = accumulator
    for _ in range(2):
        accumulator.begin()
        outputs, inputs = [], []
        for part, seed in zip(x.split(split), upstream.split(split), strict=True):
            leaf = part.clone().requires_grad_()
            y = module(leaf)
            inputs.append(torch.autograd.grad(y, leaf, seed)[0])
            outputs.append(y.detach())
        found = accumulator.finish()
    assert found is not None
    return torch.cat(outputs), torch.cat(inputs), found


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_float64(kind: str) -> None:
    x, module = rows(50, 1), stock(kind).double()
    wide = x.double().requires_grad_()
    if kind == "gemma":  # the stock module computes in float32 whatever it is given
        n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        expected = n * (1.0 + module.weight)
    else:
        expected = module(wide)
    upstream = torch.randn(expected.shape, generator=seeded(2))
    expected.backward(upstream.double())
    y, dx, parameters = gradients(kind, x, upstream, 50)
    # operands of 26 bits: 2^-27 of a row's largest element, here 200 times the others; means are exact to 2^-40
    pairs = [(y, expected.detach()), (dx, wide.grad), *((parameters[n], p.grad) for n, p in module.named_parameters())]
    assert len(pairs) == 3 + (kind != "gemma")
    for got, reference in pairs:
        assert float((got - reference).norm() / reference.norm()) < 3e-6


@pytest.mark.parametrize("kind", KINDS)
def test_neither_order_nor_splits_of_the_rows_change_a_bit(kind: str) -> None:
    x = rows(80, 3)
    upstream = torch.randn(80, 40 if kind == "conv1d" else WIDTH, generator=seeded(4))
    reference = gradients(kind, x, upstream, 80)
    plain = set()
    for seed, split in ((0, 80), (1, 7), (2, 1)):
        order = torch.randperm(80, generator=seeded(seed))
        y, dx, parameters = gradients(kind, x[order], upstream[order], split)
        assert unequal(y, reference[0][order]) == 0 and unequal(dx, reference[1][order]) == 0
        assert all(unequal(parameters[n], reference[2][n]) == 0 for n in reference[2])
        plain.add(tuple(sum_in_order(upstream[order]).tolist()))
    assert len(plain) == 3, "the gradient of a bias, added up row by row, shows the order"


@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(0, 10**6))
def test_sums_over_a_row_do_not_depend_on_the_order_of_its_elements(size: int, seed: int) -> None:
    generator = seeded(seed)
    # 53 bits of many sizes: sums of them in float64 would round
    a, b = torch.randn(2, 3, size, generator=generator, dtype=torch.float64)
    a = a * 2.0 ** torch.randint(-20, 1, (3, size), generator=generator)
    order = torch.randperm(size, generator=generator)
    assert unequal(row_mean(a[:, order]), row_mean(a)) == 0
    assert unequal(row_mean_square(a[:, order]), row_mean_square(a)) == 0
    assert unequal(row_dot(a[:, order], b[:, order]), row_dot(a, b)) == 0
    assert unequal(row_dot(a, a), row_mean_square(a)) == 0


def test_plain_sums_over_a_row_do_depend_on_the_order() -> None:
    generator = seeded(0)
    a = torch.randn(100, 300, generator=generator, dtype=torch.float64)
    order = torch.randperm(300, generator=generator)
    assert unequal(a[:, order].mean(-1), a.mean(-1)) > 0 and unequal((a * a)[:, order].sum(-1), (a * a).sum(-1)) > 0


@settings(max_examples=50)
@given(st.integers(1, 300), st.integers(0, 10**6))
def test_the_mean_of_float32_numbers_of_similar_size_is_the_exact_one(size: int, seed: int) -> None:
    x = torch.randint(-(2**23), 2**23, (1, size), generator=seeded(seed)).to(torch.float32) * 2.0**-10
    # 24 bits fit the widest grid, so only the division by the length rounds
    assert row_mean(x).item() == float(Fraction(sum(map(Fraction, x[0].tolist()))) / size)


def test_layer_norm_by_hand() -> None:
    module = nn.LayerNorm(4, eps=0.0)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        module.bias.fill_(0.5)
    # mean 4, deviations -3 -1 1 3, variance 5
    r = 1 / math.sqrt(5.0)
    found = ExactLayerNorm(module, "norm")(torch.tensor([[1.0, 3.0, 5.0, 7.0]]))[0].tolist()
    assert found == pytest.approx([0.5 - 3 * r, 0.5 - 2 * r, 0.5 + 3 * r, 0.5 + 12 * r], rel=1e-7)


def test_a_large_offset_does_not_hide_the_variance() -> None:
    x = torch.tensor([[0.0, 0.3, 0.3, 0.3]]) + 10_000.0
    norm = ExactLayerNorm(nn.LayerNorm(4, eps=0.0), "norm")
    # subtracting the offset again is exact, and rounds nothing off
    assert torch.allclose(norm(x), norm(x - 10_000.0), rtol=1e-6, atol=0)
    # a mean from operands of 20 bits shows: the deviations are below one
    integers, scale = quantise(x, 20)
    assert abs(float((integers * scale).mean() - x.double().mean())) > 1e-3


def test_gemma_norm_counts_its_weight_from_one() -> None:
    module = ExactGemmaRMSNorm(nn.Parameter(torch.tensor([0.0, -1.0])), 0.0, "norm")
    # root of the mean square of (3, 4) is sqrt(12.5)
    assert module(torch.tensor([[3.0, 4.0]]))[0].tolist() == pytest.approx([3 / math.sqrt(12.5), 0.0], rel=1e-7)


def test_conv1d_is_a_linear_layer_with_its_weight_transposed() -> None:
    source = stock("conv1d")
    linear = nn.Linear(WIDTH, 40)
    with torch.no_grad():
        linear.weight.copy_(source.weight.t())
        linear.bias.copy_(source.bias)
    x, upstream = rows(20, 5), torch.randn(20, 40, generator=seeded(6))
    y, dx, parameters = gradients("conv1d", x, upstream, 20)
    twin = ExactLinear(linear, "layer")
    accumulator = GradientAccumulator(twin.named_parameters())
    twin.accumulator = accumulator
    for _ in range(2):
        accumulator.begin()
        leaf = x.clone().requires_grad_()
        out = twin(leaf)
        expected = torch.autograd.grad(out, leaf, upstream)[0]
        found = accumulator.finish()
    assert found is not None
    assert unequal(y, out.detach()) == 0 and unequal(dx, expected) == 0
    assert unequal(parameters["weight"], found["weight"].t()) == 0 and unequal(parameters["bias"], found["bias"]) == 0


@pytest.mark.parametrize("kind", ["layer norm", "gemma"])
def test_rows_without_spread_give_no_nan(kind: str) -> None:
    x = torch.cat([torch.zeros(1, WIDTH), torch.full((1, WIDTH), 1e-30), torch.full((1, WIDTH), 7.0)])
    y, dx, parameters = gradients(kind, x, torch.ones(3, WIDTH), 3)
    assert all(bool(torch.isfinite(t).all()) for t in (y, dx, *parameters.values()))
    if kind == "layer norm":
        assert unequal(y, stock(kind).bias.detach().expand(3, -1)) == 0
