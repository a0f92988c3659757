"""Elementary functions: as accurate as documented, whatever a value's position in a tensor."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.numerics import elementwise
from ppo_repro.numerics.elementwise import Exp
from ppo_repro.numerics.layers.activations import SiLU
from tests.support.float32 import LARGEST, SMALLEST_NORMAL, TINIEST, bits, finite, tensor


def random(count: int, low: float, high: float, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(count, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)


def positive_float32(count: int) -> Tensor:
    """Uniform over the bit patterns of positive finite numbers, so over all exponents."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 0x7F800000, (count,), generator=generator, dtype=torch.int32).view(torch.float32)


def silu_gradient(x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    y = SiLU.apply(leaf)
    return torch.autograd.grad(y, leaf, torch.ones_like(y))[0]


def test_exp_of_zero_is_exactly_one() -> None:
    assert bits(elementwise.exp(tensor([0.0, -0.0, TINIEST, -TINIEST]))) == bits(torch.ones(4))


@pytest.mark.parametrize(("low", "high"), [(-87.0, 88.0), (-1.0, 1.0), (-1e-6, 1e-6)])
def test_exp_is_accurate_to_1e_7(low: float, high: float) -> None:
    x = torch.cat([random(150_000, low, high, torch.float32), tensor([low, high])])
    # half-way points of the argument reduction, where the polynomial is used at its ends
    x = torch.cat([x, (torch.arange(-124, 126) + 0.5).to(torch.float32) * math.log(2)]).clamp(low, high)
    expected = torch.tensor([math.exp(v) for v in x.tolist()], dtype=torch.float64)
    # the promise; 2^-24 = 6.0e-8 is the last rounding, and 8.4e-8 the worst of 5 million arguments tried
    assert float(((elementwise.exp(x) - expected) / expected).abs().max()) < 1e-7


def test_exp_stops_at_the_ends_of_its_range() -> None:
    x = tensor([-87.0, -87.5, -1e4, -LARGEST, -math.inf])
    y = tensor([88.0, 88.5, 1e4, LARGEST, math.inf])
    assert len(set(bits(elementwise.exp(x)))) == 1 and len(set(bits(elementwise.exp(y)))) == 1
    assert SMALLEST_NORMAL < elementwise.exp(x)[0].item() < 2e-38 < 1e38 < elementwise.exp(y)[0].item() < LARGEST


def test_log_is_accurate_to_a_few_units_in_the_last_place() -> None:
    x = torch.cat(
        [
            torch.exp(random(50_000, -708, 709)),
            random(50_000, 0.5, 2.0),
            1 + random(20_000, -1e-3, 1e-3),
            torch.tensor([2.0**-1022, math.sqrt(0.5), math.sqrt(2), 2.0, 1e308], dtype=torch.float64),
            torch.tensor([1 - 2.0**-53, 1.0, 1 + 2.0**-52], dtype=torch.float64),
        ]
    )
    for v, got in zip(x.tolist(), elementwise.log(x).tolist(), strict=True):
        exact = math.log(v)
        # "a few units": two divisions, the series and the last product, where |ln x| is small; 3 is the worst seen
        assert abs(got - exact) <= 4 * math.ulp(exact)


def test_cosine_and_sine_are_accurate_over_the_whole_range() -> None:
    x = torch.cat(
        [
            random(60_000, 0, 2**20),
            random(20_000, 0, 10),
            torch.arange(0, 667_000, 7, dtype=torch.float64) * (math.pi / 2),  # next to the zeros
            torch.arange(0, 32768, dtype=torch.float64),  # what rotary positions ask for
            torch.tensor([0.0, math.pi / 4, 2.0**20 - 2.0**-33], dtype=torch.float64),
        ]
    )
    cosine, sine = elementwise.cos_sin(x)
    for v, c, s in zip(x.tolist(), cosine.tolist(), sine.tolist(), strict=True):
        # the promise; 2^-52 = 2.2e-16 is one unit in the last place of 1
        assert abs(c - math.cos(v)) < 1e-15 and abs(s - math.sin(v)) < 1e-15


@pytest.mark.parametrize("base", [1e4, 1e6, 5e5, 0.9, 0.999, 0.95, 2.0, 123.456])
def test_power_is_accurate(base: float) -> None:
    largest = 600.0 / abs(math.log(base))
    x = torch.cat([random(10_000, -largest, largest), random(10_000, -2, 2), torch.arange(-100.0, 101.0)])
    x = x[x.abs() <= largest]
    for exponent, got in zip(x.tolist(), elementwise.power(base, x).tolist(), strict=True):
        # ln(base) is off by 3 units of 2^-53, which the exponent magnifies; then the exponential's own 4
        tolerance = (4 + 4 * abs(exponent * math.log(base))) * 2.0**-53
        assert got == pytest.approx(math.pow(base, exponent), rel=tolerance)


def test_powers_that_are_known() -> None:
    assert elementwise.power(7.0, torch.zeros(1)).tolist() == [1.0]
    assert elementwise.power(1.0, torch.tensor([-3.0, 0.5, 1e3])).tolist() == [1.0] * 3
    assert elementwise.pow2(torch.tensor([-1022, -1, 0, 1, 1023])).tolist() == [2.0**e for e in (-1022, -1, 0, 1, 1023)]


def test_sqrt_is_the_nearest_float32() -> None:
    x = torch.cat([positive_float32(100_000), tensor([0.0, TINIEST, SMALLEST_NORMAL, LARGEST, math.inf, 1.0, 2.0])])
    # the float64 root has more than twice the digits, so rounding it once more is harmless
    expected = np.sqrt(x.numpy().astype(np.float64)).astype(np.float32)
    assert bits(elementwise.sqrt(x)) == expected.view(np.int32).tolist()
    for v, root in zip(x[:2000].tolist(), elementwise.sqrt(x[:2000]).numpy(), strict=True):
        # in rationals: x lies between the squares of the midpoints to both neighbours
        below, above = (Fraction(float(np.nextafter(root, np.float32(d)))) for d in (0, math.inf))
        middle = Fraction(float(root))
        assert ((below + middle) / 2) ** 2 <= Fraction(v) <= ((above + middle) / 2) ** 2


def test_sqrt_takes_any_shape_and_both_precisions() -> None:
    assert elementwise.sqrt(torch.tensor(4.0)).shape == ()
    assert elementwise.sqrt(torch.ones(3, 4).t()).shape == (4, 3)
    x = torch.exp(random(1000, -700, 700))
    assert elementwise.sqrt(x).tolist() == [math.sqrt(v) for v in x.tolist()]


def test_a_square_root_that_is_not_always_the_nearest_is_seen() -> None:
    """The negative control: rounded twice, as vector libraries do it that take the reciprocal square root."""
    x = positive_float32(100_000)
    assert int((x * (1.0 / elementwise.sqrt(x)) != elementwise.sqrt(x)).sum()) > 0


# name -> (function, smallest and largest argument, dtype)
Function = Callable[[Tensor], Tensor]
FUNCTIONS: dict[str, tuple[Function, float, float, torch.dtype]] = {
    "exp": (elementwise.exp, -LARGEST, LARGEST, torch.float32),
    "Exp": (Exp.apply, -100.0, 100.0, torch.float32),
    "SiLU": (SiLU.apply, -1e30, 1e30, torch.float32),
    "SiLU backward": (silu_gradient, -1e30, 1e30, torch.float32),
    "sqrt": (elementwise.sqrt, 0.0, LARGEST, torch.float32),
    "log": (elementwise.log, 1e-30, 1e30, torch.float64),
    "cos": (lambda x: elementwise.cos_sin(x)[0], 0.0, 1e6, torch.float64),
    "sin": (lambda x: elementwise.cos_sin(x)[1], 0.0, 1e6, torch.float64),
    "power": (lambda x: elementwise.power(1e4, x), -60.0, 60.0, torch.float64),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=50)
@given(st.data())
def test_a_result_does_not_depend_on_the_position_of_its_argument(name: str, data: st.DataObject) -> None:
    function, low, high, dtype = FUNCTIONS[name]
    values = data.draw(st.lists(finite(low, high), min_size=1, max_size=70))
    offset, stride = data.draw(st.integers(0, 17)), data.draw(st.integers(1, 3))
    buffer = torch.ones(offset + stride * len(values) + 5, dtype=dtype)
    there = buffer[offset : offset + stride * len(values) : stride]
    there.copy_(torch.tensor(values, dtype=dtype))
    before = bits(buffer)
    alone = [bits(function(torch.tensor([v], dtype=dtype)))[0] for v in values]
    assert bits(function(there)) == alone
    assert bits(function(there.flip(0))) == alone[::-1]
    assert bits(function(there[:, None].expand(-1, 3).t())) == alone * 3
    assert bits(buffer) == before, "the argument must not change"


def test_results_are_pinned() -> None:
    """Golden values: a machine, a torch version or a coefficient that changes any bit is noticed."""
    x = torch.from_numpy(np.arange(-87_000, 88_000).astype(np.float32) / np.float32(1000))
    positive = torch.from_numpy(np.arange(1, 100_000) / 7.0)
    results = [
        elementwise.exp(x),
        SiLU.apply(x),
        silu_gradient(x),
        elementwise.sqrt(positive.to(torch.float32)),
        elementwise.log(positive),
        *elementwise.cos_sin(positive),
        elementwise.power(1e4, positive / 250),
    ]
    assert [hashlib.sha256(r.numpy().tobytes()).hexdigest()[:16] for r in results] == [
        "f9acc8504c143e80",
        "a6de8a1060302bb7",
        "263c805058325a1a",
        "d40fc4f0c5b0724d",
        "385df9e2848c72bd",
        "9b9ed84bed1fec5f",
        "035a69c3f42d4b33",
        "682617dd7111d614",
    ]


def test_a_function_that_depends_on_the_position_of_its_argument_is_seen() -> None:
    """The negative control: two formulas, as libraries have one for packed vectors and one for single numbers."""

    def by_place(x: Tensor) -> Tensor:
        e = elementwise.exp(-x)
        return x / (e + 1.0) if x.is_contiguous() else x * (1.0 / (e + 1.0))

    buffer = random(8192, -8, 8, torch.float32)
    strided, packed = buffer[::2], buffer[::2].contiguous()
    assert bits(by_place(strided)) != bits(by_place(packed))
    assert bits(SiLU.apply(strided)) == bits(SiLU.apply(packed))


@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_backward_of_exp_is_its_derivative(factor: float) -> None:
    x = random(20_000, -80, 80, torch.float32).requires_grad_()
    y = Exp.apply(x)
    got = torch.autograd.grad(y, x, torch.full_like(y, factor))[0]
    assert bits(y) == bits(elementwise.exp(x))
    wide = x.detach().to(torch.float64).requires_grad_()
    expected = torch.autograd.grad(torch.exp(wide).sum(), wide)[0] * factor
    # 1e-7 of the exponential and one rounding of the product
    assert float(((got - expected) / expected).abs().max()) < 1e-7 + 2.0**-24


@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_silu_and_its_backward_against_float64(factor: float) -> None:
    x = torch.cat([random(20_000, -80, 80, torch.float32), random(20_000, -3, 3, torch.float32)]).requires_grad_()
    y = SiLU.apply(x)
    got = torch.autograd.grad(y, x, torch.full_like(y, factor))[0]
    wide = x.detach().to(torch.float64).requires_grad_()
    expected = torch.autograd.grad(torch.nn.functional.silu(wide).sum(), wide)[0] * factor
    exact, y = torch.nn.functional.silu(wide).detach(), y.detach()
    # 1e-7 of the exponential, roundings of the sum and the quotient
    assert float(((y - exact) / exact).abs().max()) < 1e-7 + 2 * 2.0**-24
    # 1 - s cancels to an absolute error of 3 2^-24, which x magnifies
    assert bool(((got - expected).abs() <= abs(factor) * 4 * 2.0**-24 * (1 + wide.detach().abs())).all())


def test_silu_by_hand() -> None:
    x = tensor([0.0, math.log(3.0), -math.log(3.0), 200.0])
    # 1 / (1 + exp(-ln 3)) = 3/4; 1e-7 of the exponential, roundings of the argument, the sum and the quotient
    expected = [0.0, 0.75 * math.log(3.0), -0.25 * math.log(3.0), 200.0]
    assert SiLU.apply(x).tolist() == pytest.approx(expected, rel=3e-7)
    assert silu_gradient(tensor([0.0])).item() == 0.5
