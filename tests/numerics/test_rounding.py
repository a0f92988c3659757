"""Rounding on purpose: numbers as in torch, rows as in the definition, errors of the expected size.

`tests/promises/test_kernels.py` compares models that round with the definition.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.benchmarks.float64 import deterministic_scores
from ppo_repro.models.networks import make_policy, rounded_view
from ppo_repro.numerics.definition.rounding import rounded as rounded_by_definition
from ppo_repro.numerics.linear import product
from ppo_repro.numerics.matrices import Packing, matrix_of, packed
from ppo_repro.numerics.rounding import FORMATS, NARROW, NumberFormats, round_rows
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.runs.accuracy import Text, policy_scores, reference_scores, stock_scores
from tests.support.float32 import LARGEST, bits, tensor
from tests.support.models import CONTEXT, EVERY_FAMILY, ragged, seeded, source_model, unequal

TORCH = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
STEPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3": 2.0**-4, "float8_e5m2": 2.0**-3, "int8": 0.5 / 127}


def unscaled(values: list[float], form: str) -> list[int]:
    return bits(round_rows(tensor(values), form, scaled=False))


def hard_cases(name: str) -> Tensor:
    """Numbers of a format, middles of neighbours, the float32 numbers beside both, and all finite bfloat16 numbers."""
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    every = every[torch.isfinite(every)]
    numbers = every.to(TORCH[name]).float().unique()
    numbers = numbers[torch.isfinite(numbers)]
    points = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    up, down = (torch.nextafter(points, torch.full_like(points, end)) for end in (math.inf, -math.inf))
    return torch.cat([points, up, down, every, tensor([LARGEST, -LARGEST, math.inf, -math.inf, 0.0, -0.0])])


@pytest.mark.parametrize("name", TORCH)
def test_a_rounded_number_is_that_of_torch(name: str) -> None:
    x = hard_cases(name)
    # beyond the largest number of 8 bits torch gives infinity or NaN, and kernels of serving stacks the largest number
    largest = torch.finfo(TORCH[name]).max if name in NARROW else math.inf
    cast = x.clamp(-largest, largest).to(TORCH[name]).float()
    assert bits(round_rows(x, name, scaled=False)) == bits(cast)
    assert bits(torch.from_numpy(rounded_by_definition(name, x.numpy(), scaled=False))) == bits(cast)
    assert round_rows(tensor([math.nan]), name, scaled=False).isnan().all()
    for other in set(TORCH) - {name}:
        assert bits(round_rows(x, other, scaled=False)) != bits(cast), "another format would pass"


@pytest.mark.parametrize(("name", "largest"), [("float8_e4m3", 448.0), ("float8_e5m2", 57344.0)])
def test_beyond_their_largest_number_8_bits_saturate_and_16_bits_overflow(name: str, largest: float) -> None:
    beyond = tensor([1e6, -1e6, LARGEST, -LARGEST, math.inf, -math.inf])
    assert round_rows(beyond, name, scaled=False).tolist() == [largest, -largest] * 3
    assert round_rows(beyond, "float16", scaled=False).tolist() == [math.inf, -math.inf] * 3


@pytest.mark.parametrize("name", FORMATS[1:])
def test_rows_are_those_of_the_definition_and_do_not_see_each_other(name: str) -> None:
    sizes = torch.exp2(torch.randint(-4, 11, (400, 1), generator=seeded(1)))
    x = torch.randn(400, 65, generator=seeded(0)) * sizes
    found, largest = round_rows(x, name), x.abs().amax(-1, keepdim=True)
    assert bits(found) == bits(torch.from_numpy(rounded_by_definition(name, x.numpy())))
    assert 0.01 * STEPS[name] < float(((found - x).abs() / largest).max()) < 1.01 * STEPS[name]
    assert bits(found) == bits(torch.cat([round_rows(row[None], name) for row in x]))


@pytest.mark.parametrize("name", FORMATS[1:])
def test_rows_of_hard_numbers_are_those_of_the_definition(name: str) -> None:
    """NaN, infinity, zeros, and denormal numbers so small that the scale of 8 bits is rounded to another size."""
    least = 2.0**-149
    x = tensor([*(math.nan, 1.0, -2.0), *(math.inf, 1.0, 0.0), *(0.0, -0.0, 0.0), *(190 * least, -190 * least, least)])
    expected = rounded_by_definition(name, x.view(4, 3).numpy())
    np.testing.assert_array_equal(round_rows(x.view(4, 3), name).numpy(), expected)


BFLOAT16 = NumberFormats("bfloat16", "bfloat16", "float32", "bfloat16", "float32", "bfloat16")
PROMPTS, RESPONSES = ragged(5, 3)
TEXT = Text(PROMPTS, RESPONSES)


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def test_a_layer_is_packed_again_for_another_format() -> None:
    layer, x = torch.nn.Linear(37, 5, bias=False), torch.ones(3, 37)
    plain = product(x, packed(layer, Packing()))
    coarse = product(x, packed(layer, Packing("int8")))
    assert unequal(coarse, product(x, packed(layer, Packing()))) > 0
    with torch.no_grad():
        layer.weight.copy_(round_rows(layer.weight.detach(), "int8"))
    assert unequal(coarse, product(x, packed(layer, Packing()))) == 0
    assert unequal(coarse, plain) > 0


def test_a_layer_is_packed_again_for_another_bias() -> None:
    layer, x = torch.nn.Linear(37, 5), torch.ones(3, 37)
    product(x, packed(layer, Packing()))
    layer.bias = None
    assert unequal(product(x, packed(layer, Packing())), product(x, matrix_of((layer,), Packing()))) == 0


@pytest.mark.parametrize("architecture", EVERY_FAMILY)
def test_a_view_rounds_as_stock_bfloat16_does_and_leaves_its_model_alone(architecture: str) -> None:
    policy = make_policy(source_model(architecture), "deterministic", CONTEXT)
    digest = weights_digest(policy.named_parameters())
    view = rounded_view(policy, BFLOAT16)
    assert [(n, id(p)) for n, p in view.named_parameters()] == [(n, id(p)) for n, p in policy.named_parameters()]
    found, plain = policy_scores(view, TEXT).logits, policy_scores(policy, TEXT).logits
    assert weights_digest(policy.named_parameters()) == digest
    assert unequal(plain, deterministic_scores(source_model(architecture), TEXT, CONTEXT).logits) == 0
    reference = reference_scores(source_model(architecture), TEXT).logits
    stock = stock_scores(source_model(architecture).bfloat16(), TEXT).logits
    # the same places are rounded but inside attention, and a flipped route weighs more than a rounding
    assert 1 / 3 < rms(found - reference) / rms(stock - reference) < 3
    assert rms(found - reference) > 100 * rms(plain - reference)
