"""Rounding to other formats: the nearest number, ties to even, as enumeration and torch's own casts say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.numerics.arithmetic.rounding import NARROW, WIDE, round_rows, round_to
from tests.support.float32 import LARGEST, bits, finite, lists, tensor
from tests.support.number_formats import SHAPES, nearest, numbers, scaled_rows

TORCH = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
FLOATS = tuple(SHAPES)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether the bit patterns are equal."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def hard_cases(name: str) -> Tensor:
    """Every number of a format, the middle of every two neighbours, and the float32 numbers beside both; both signs."""
    table = numbers(name)
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2]).astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    return torch.from_numpy(np.concatenate([near, -near]))


def every_bfloat16() -> Tensor:
    """All finite bfloat16 numbers, which reach over all exponents of float32, as float32."""
    patterns = torch.arange(1 << 16, dtype=torch.int32) << 16
    found = patterns.view(torch.float32)
    return found[torch.isfinite(found)]


@pytest.mark.parametrize("name", FLOATS)
def test_it_is_the_nearest_number_with_ties_to_even(name: str) -> None:
    x = torch.cat([hard_cases(name), every_bfloat16(), tensor([LARGEST, -LARGEST, 0.0, -0.0])])
    expected = torch.from_numpy(nearest(x.double().numpy(), name)).float()
    assert same(round_to(x, name), expected)
    away = torch.from_numpy(np.copysign(nearest(np.nextafter(x.abs().double().numpy(), np.inf), name), x.numpy()))
    assert not same(away.float(), expected), "ties away from zero would pass"


@pytest.mark.parametrize("name", FLOATS)
def test_it_is_the_cast_of_torch_up_to_the_largest_number(name: str) -> None:
    x = torch.cat([hard_cases(name), every_bfloat16()])
    if name in NARROW:  # beyond it torch gives infinity or NaN, and the law the largest number
        x = x[x.abs() <= SHAPES[name][2]]
    assert len(x) > 60_000 / 4
    assert same(round_to(x, name), x.to(TORCH[name]).float())
    for other in set(FLOATS) - {name}:
        assert not same(round_to(x, other), x.to(TORCH[name]).float()), "another format would pass"


def test_by_hand() -> None:
    assert bits(round_to(tensor([1.00390625, 1.01171875, 1.00390637]), "bfloat16")) == bits(
        tensor([1.0, 1.015625, 1.0078125])
    )
    assert bits(round_to(tensor([65519.996, 65520.0, -1e6, 2.0**-25, 2.0**-24 * 1.5]), "float16")) == bits(
        tensor([65504.0, math.inf, -math.inf, 0.0, 2.0**-23])
    )
    assert bits(round_to(tensor([464.0, 1e9, -500.0, 2.0**-10, 1.0625]), "float8_e4m3")) == bits(
        tensor([448.0, 448.0, -448.0, 0.0, 1.0])
    )
    assert bits(round_to(tensor([61440.0, -1e9, 1.125, 1.375]), "float8_e5m2")) == bits(
        tensor([57344.0, -57344.0, 1.0, 1.5])
    )


@pytest.mark.parametrize("name", FLOATS)
def test_what_is_not_finite_stays(name: str) -> None:
    patterns = [0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000]
    x = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    assert bits(round_to(torch.cat([x, -x]), name)) == bits(torch.cat([x, -x]))


def test_rows_by_hand() -> None:
    x = tensor([[127.0, -3.5, 2.5, 0.4], [0.0, -0.0, 0.0, 0.0]])
    assert bits(round_rows(x, "int8")) == bits(tensor([[127.0, -4.0, 2.0, 0.0], [0.0, -0.0, 0.0, 0.0]]))
    # the largest of the row is 448 times a power of two, so scales are exact
    assert bits(round_rows(x[:1] * 448 / 127, "float8_e4m3")[:, :1]) == bits(tensor([[448.0]]))
    row = tensor([[896.0, 17.0, -1.0]])
    assert bits(round_rows(row, "float8_e4m3")) == bits(tensor([[896.0, 16.0, -1.0]]))
    assert bits(round_rows(row, "bfloat16")) == bits(round_to(row, "bfloat16"))


@pytest.mark.parametrize("name", (*NARROW, *WIDE))
def test_rows_are_within_rounding_of_the_definition_in_float64(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 65, generator=generator) * torch.exp2(torch.randint(-4, 11, (400, 1), generator=generator))
    found, expected = round_rows(x, name).double(), torch.from_numpy(scaled_rows(x.double().numpy(), name))
    error = (found - expected).abs() / x.abs().amax(-1, keepdim=True)
    # the scale and the product with it are rounded to float32; a tie of x / s may fall the other way
    assert float(error.quantile(0.999)) < 3e-7
    step = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3": 2.0**-4, "float8_e5m2": 2.0**-3, "int8": 1 / 127}
    assert float(error.max()) < 1.01 * step[name]
    assert float((found - x).abs().max() / x.abs().max()) > step[name] / 100, "nothing was rounded"


@given(st.sampled_from((*NARROW, *WIDE)), lists(size=12), lists(size=12))
def test_a_row_does_not_see_other_rows(name: str, first: list[float], second: list[float]) -> None:
    width = max(len(first), len(second))
    x = tensor([[*row, *[0.0] * (width - len(row))] for row in (first, second)])
    together = round_rows(x, name)
    assert bits(together) == bits(torch.cat([round_rows(row[None], name) for row in x]))
    assert bits(round_rows(x.t().contiguous().t(), name)) == bits(together), "strides show"


@given(st.sampled_from(FLOATS), finite())
def test_it_is_idempotent_odd_and_monotone(name: str, value: float) -> None:
    x = tensor([value])
    y = round_to(x, name)
    assert bits(round_to(y, name)) == bits(y) and bits(round_to(-x, name)) == bits(-y)
    assert float(round_to(torch.nextafter(x, tensor([math.inf])), name)) >= float(y)


@given(st.sampled_from(NARROW), lists(-1e30, 1e30, 12))
def test_no_number_of_a_row_is_off_by_more_than_half_a_step(name: str, values: list[float]) -> None:
    x = tensor([values])
    step = {"float8_e4m3": 2.0**-4, "float8_e5m2": 2.0**-3, "int8": 0.5 / 127}[name]
    assert float((round_rows(x, name) - x).abs().max()) <= 1.001 * step * float(x.abs().max()) + 2.0**-140
