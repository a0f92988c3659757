"""GELU in three forms: accurate, blind to position, with derivatives in closed form."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.numerics import backend
from ppo_repro.numerics.elementwise import exp64
from ppo_repro.numerics.arithmetic.gates import Gate, normal_cdf, quick_gate, tanh_gate
from ppo_repro.numerics.layers.activations import Gated
from tests.support.float32 import LARGEST, TINIEST, bits, finite, tensor

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def erf_reference(x: float) -> float:
    return x * 0.5 * math.erfc(-x / math.sqrt(2.0))


def tanh_reference(x: float) -> float:
    u = SQRT_2_OVER_PI * (x + 0.044715 * x**3)
    # (1 + tanh u) / 2, written so that the tail keeps its digits
    return x * math.exp(2 * u) / (1 + math.exp(2 * u)) if u < 0 else x / (1 + math.exp(-2 * u))


def quick_reference(x: float) -> float:
    u = 1.702 * x
    return x * math.exp(u) / (1 + math.exp(u)) if u < 0 else x / (1 + math.exp(-u))


STOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": torch.nn.functional.gelu,
    "tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
}
GATES: dict[str, tuple[Gate, Callable[[float], float]]] = {
    "erf": (normal_cdf, erf_reference),
    "tanh": (tanh_gate, tanh_reference),
    "quick": (quick_gate, quick_reference),
}


def apply(name: str, x: Tensor) -> Tensor:
    return Gated.apply(x, GATES[name][0])


def gradient(name: str, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    y = Gated.apply(leaf, GATES[name][0])
    return torch.autograd.grad(y, leaf, torch.ones_like(y))[0]


def arguments(low: float, high: float, count: int = 40_000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, generator=generator, dtype=torch.float64)
    near = torch.randn(count, generator=generator, dtype=torch.float64)
    tiny = near * 2.0 ** torch.randint(-140, 0, (count,), generator=generator)
    return torch.cat([x * (high - low) + low, near, tiny]).clamp(low, high).to(torch.float32)


@pytest.mark.parametrize("name", GATES)
def test_every_result_is_a_rounding_away_from_the_exact_one(name: str) -> None:
    x = arguments(-60.0, 60.0)
    found = apply(name, x).tolist()
    for v, y in zip(x.tolist(), found, strict=True):
        exact = GATES[name][1](v)
        # half a unit in the last place of float32, relative even far out in the tail, and 1e-9 for float64
        assert abs(y - exact) <= (2.0**-24 + 1e-9) * abs(exact) + TINIEST / 2


def test_the_normal_distribution_is_accurate_to_1e_12() -> None:
    x = torch.linspace(-37.0, 37.0, 7_401, dtype=torch.float64)
    cdf, density = normal_cdf(x)
    for v, c, d in zip(x.tolist(), cdf.tolist(), density.tolist(), strict=True):
        assert c == pytest.approx(0.5 * math.erfc(-v / math.sqrt(2.0)), rel=1e-12)
        # x^2 / 2 is rounded to 2^-53 of up to 684, which the exponential turns into a relative error of 8e-14
        assert d == pytest.approx(math.exp(-v * v / 2) / math.sqrt(2 * math.pi), rel=2e-13)


def test_exp64_is_accurate_and_stops_at_the_ends_of_its_range() -> None:
    x = torch.linspace(-708.0, 709.0, 10_001, dtype=torch.float64)
    for v, found in zip(x.tolist(), exp64(x).tolist(), strict=True):
        # 1.5 units of 2^-53 is the worst of 20,000 arguments, and the C library's own is up to 2
        assert found == pytest.approx(math.exp(v), rel=4 * 2.0**-53)
    ends = exp64(torch.tensor([-math.inf, -1e9, -708.0, 709.0, 1e9, math.inf], dtype=torch.float64)).tolist()
    assert len(set(ends[:3])) == 1 and len(set(ends[3:])) == 1 and ends[0] > 0 and math.isfinite(ends[-1])
    assert exp64(torch.zeros(1, dtype=torch.float64)).item() == 1.0


@pytest.mark.parametrize("name", GATES)
def test_backward_is_the_derivative(name: str) -> None:
    x = arguments(-60.0, 60.0)
    leaf = x.requires_grad_()
    y = Gated.apply(leaf, GATES[name][0])
    found = torch.autograd.grad(y, leaf, torch.full_like(y, -2.5))[0].double()
    wide = x.detach().double().requires_grad_()
    expected = torch.autograd.grad(STOCK[name](wide).sum(), wide)[0] * -2.5
    # the rounding to float32; torch's own float64 derivative loses digits against 1 in the tail
    assert bool(((found - expected).abs() <= 2.0**-23 * expected.abs() + 1e-12).all())


@pytest.mark.parametrize("name", GATES)
def test_values_that_are_known(name: str) -> None:
    y = apply(name, tensor([0.0, -0.0, 2.0**-126, -(2.0**-140), math.inf, -math.inf, LARGEST, -LARGEST]))
    # x / 2 near 0, denormals included; zeros keep their sign, the limits at infinity are x and -0
    assert bits(y) == bits(tensor([0.0, -0.0, 2.0**-127, -(2.0**-141), math.inf, -0.0, LARGEST, -0.0]))
    # half the smallest denormal lies midway between two numbers
    assert {abs(v) for v in apply(name, tensor([TINIEST, -TINIEST])).tolist()} <= {0.0, TINIEST}
    assert math.isnan(apply(name, tensor([math.nan])).item())
    slopes = gradient(name, tensor([0.0, -0.0, 60.0, -60.0, LARGEST, -LARGEST, math.inf, -math.inf]))
    assert slopes.tolist() == pytest.approx([0.5, 0.5, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0], abs=1e-40)


def test_by_hand() -> None:
    # Phi(1) = 0.8413447460685429
    assert apply("erf", tensor([1.0, -1.0])).tolist() == pytest.approx([0.8413447, -0.1586553], abs=1e-7)
    # exp(-1.702 x) = 1/3 at x = ln 3 / 1.702
    assert apply("quick", tensor([math.log(3.0) / 1.702])).item() == pytest.approx(0.75 * math.log(3.0) / 1.702, 1e-6)


@pytest.mark.parametrize("name", GATES)
@settings(max_examples=80)
@given(st.data())
def test_x_and_minus_x_differ_by_x_and_it_rises_right_of_its_minimum(name: str, data: st.DataObject) -> None:
    x = data.draw(finite(-40, 40))
    positive, negative = apply(name, tensor([x, -x])).tolist()
    # g(x) + g(-x) = 1; both were rounded
    assert positive - negative == pytest.approx(x, abs=2.0**-23 * abs(x) + TINIEST)
    a, b = sorted([data.draw(finite(-0.5, 40)), data.draw(finite(-0.5, 40))])
    low, high = apply(name, tensor([a, b])).tolist()
    assert low <= high


@pytest.mark.parametrize("name", GATES)
def test_neighbours_keep_their_order(name: str) -> None:
    start = torch.linspace(0.0, 12.0, 2000).numpy()
    following = np.nextafter(start, np.float32(math.inf))
    assert bool((apply(name, torch.from_numpy(start)) <= apply(name, torch.from_numpy(following))).all())


@pytest.mark.parametrize("kind", ["value", "gradient"])
@pytest.mark.parametrize("name", GATES)
@settings(max_examples=25)
@given(st.data())
def test_a_result_does_not_depend_on_where_its_argument_lies(name: str, kind: str, data: st.DataObject) -> None:
    def function(x: Tensor) -> Tensor:
        return apply(name, x) if kind == "value" else gradient(name, x)

    values = data.draw(st.lists(finite(-1e30, 1e30), min_size=1, max_size=70))
    offset, stride = data.draw(st.integers(0, 17)), data.draw(st.integers(1, 3))
    buffer = torch.ones(offset + stride * len(values) + 5)
    there = buffer[offset : offset + stride * len(values) : stride]
    there.copy_(tensor(values))
    before = bits(buffer)
    alone = [bits(function(tensor([v])))[0] for v in values]
    assert bits(function(there)) == alone
    assert bits(function(there.flip(0))) == alone[::-1]
    assert bits(function(there[:, None].expand(-1, 3).t())) == alone * 3
    assert bits(buffer) == before, "the argument must not change"


def test_neither_strides_nor_vectors_show() -> None:
    """Its control is that of SiLU, in `arithmetic/test_elementwise.py`."""
    buffer = arguments(-8.0, 8.0, 4096)
    strided, packed = buffer[::2], buffer[::2].contiguous()
    assert all(bits(apply(name, strided)) == bits(apply(name, packed)) for name in GATES)


@pytest.mark.parametrize("computed_by", ["eager", "float64"])
def test_results_are_pinned(computed_by: str) -> None:
    """Golden values: another machine, torch or coefficient that changes any bit must not pass unseen."""
    backend.use(computed_by, 1)
    x = torch.from_numpy(np.arange(-40_000, 40_000).astype(np.float32) / np.float32(1000))
    found = {name: (apply(name, x), gradient(name, x)) for name in GATES}
    digests = {
        name: [hashlib.sha256(r.numpy().tobytes()).hexdigest()[:16] for r in results] for name, results in found.items()
    }
    assert digests == {
        "erf": ["6a6d57f899cfd8a4", "20f82b08f10ba4ac"],
        "tanh": ["626f064d4acb2f66", "4ab6e575dc73ae5d"],
        "quick": ["b0fefd104dc99cca", "5a1c35b13a4c1eb7"],
    }
