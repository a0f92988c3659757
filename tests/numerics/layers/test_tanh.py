"""tanh: accurate, odd, blind to position, the same by kernels; its derivative; what stock torch does instead."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.numerics import elementwise
from ppo_repro.numerics.layers.activations import TANH_SERIES, ExactTanh, Tanh, tanh
from tests.support.float32 import LARGEST, TINIEST, bits, finite, lists, tensor
from tests.support.kernels import both, threads


def arguments() -> Tensor:
    """Evenly spaced, logarithmic down to denormals, and both sides of the border between the two formulas."""
    wide = np.linspace(-25.0, 25.0, 40_001)
    small = np.concatenate([s * 2.0 ** np.linspace(-149.0, 5.0, 20_001) for s in (1.0, -1.0)])
    border = TANH_SERIES + np.arange(-500, 500) * 2.0**-36
    return torch.from_numpy(np.concatenate([wide, small, border]).astype(np.float32))


def test_every_result_is_a_rounding_away_from_the_exact_one() -> None:
    x = arguments()
    found = tanh(x).tolist()
    for v, y in zip(x.tolist(), found, strict=True):
        # half a unit in the last place of float32, and 1e-11 for what float64 lost just above the border
        assert abs(y - math.tanh(v)) <= (2.0**-24 + 1e-11) * abs(math.tanh(v)) + TINIEST / 2


def test_values_that_are_known() -> None:
    x = tensor([0.0, -0.0, TINIEST, -TINIEST, math.inf, -math.inf, LARGEST, 9.5, math.log(3.0) / 2])
    # tanh(x) = x for denormals; tanh(ln(3) / 2) = (3 - 1) / (3 + 1)
    assert bits(tanh(x)) == bits(tensor([0.0, -0.0, TINIEST, -TINIEST, 1.0, -1.0, 1.0, 1.0, 0.5]))
    assert math.isnan(tanh(tensor([math.nan])).item())


@given(finite(-30, 30), finite(-30, 30))
def test_odd_to_the_bit_and_rising(a: float, b: float) -> None:
    low, high = sorted([a, b])
    y = tanh(tensor([low, high, -low]))
    assert y[0] <= y[1] and bits(-y[0]) == bits(y[2]) and bool((y.abs() <= 1).all())


def test_neighbours_keep_their_order_across_the_border() -> None:
    x = np.float32(TANH_SERIES) + np.arange(-2000, 2000) * np.float32(2.0**-35)
    assert bool((tanh(torch.from_numpy(x.astype(np.float32))).diff() >= 0).all())


def test_backward_is_the_derivative() -> None:
    x = torch.linspace(-6.0, 6.0, 5001).requires_grad_()
    y = ExactTanh()(x)
    found = torch.autograd.grad(y, x, torch.full_like(y, -2.5))[0].tolist()
    for v, slope in zip(x.tolist(), found, strict=True):
        # 1 - y^2 from y rounded to 2^-24, the square rounded again; relative to 1, as in stock torch
        assert slope == pytest.approx(-2.5 / math.cosh(v) ** 2, abs=2.5 * 4 * 2.0**-24)


@settings(max_examples=40)
@given(st.data())
def test_a_result_does_not_depend_on_where_its_argument_lies(data: st.DataObject) -> None:
    values = data.draw(st.lists(finite(-1e30, 1e30), min_size=1, max_size=70))
    offset, stride = data.draw(st.integers(0, 17)), data.draw(st.integers(1, 3))
    buffer = torch.ones(offset + stride * len(values) + 5)
    there = buffer[offset : offset + stride * len(values) : stride]
    there.copy_(tensor(values))
    alone = [bits(tanh(tensor([v])))[0] for v in values]
    assert bits(tanh(there)) == alone and bits(tanh(there.flip(0))) == alone[::-1]


def test_another_formula_gives_other_bits() -> None:
    """The negative control: 1 - 2 / (e^2x + 1), so equal bits above are no accident."""
    x = arguments()
    assert bits(1.0 - 2.0 / (elementwise.exp(2.0 * x) + 1.0)) != bits(tanh(x))


@settings(max_examples=60)
@given(lists(size=200), threads)
def test_kernels_equal_the_eager_code(values: list[float], count: int) -> None:
    x = torch.cat([tensor(values), tensor([0.0, -0.0, TANH_SERIES, -TANH_SERIES])])

    def compute() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = Tanh.apply(leaf)
        y.backward(torch.linspace(-1.0, 2.0, len(x)))
        assert leaf.grad is not None
        return [y, leaf.grad]

    expected, found = both(compute, count)
    assert expected == found


def test_kernels_equal_the_eager_code_over_many_arguments() -> None:
    x = arguments()
    expected, found = both(lambda: [Tanh.apply(x)], 2)
    assert expected == found


def test_results_are_pinned() -> None:
    """Golden value: another machine, torch or constant that changes any bit must not pass unseen."""
    x = torch.from_numpy(np.arange(-40_000, 40_000).astype(np.float32) / np.float32(4000))
    assert hashlib.sha256(tanh(x).numpy().tobytes()).hexdigest()[:16] == "9b64c74465b209b4"
