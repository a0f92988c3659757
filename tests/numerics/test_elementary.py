"""Elementary functions in C: bit for bit those of the definition, and how far they are from the truth."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import ppo_repro.numerics
from ppo_repro.numerics import build, library
from ppo_repro.numerics.definition import elementary as definition
from ppo_repro.numerics.interface import pointer
from tests.support.variants import ABLE, opened

F, D = np.float32, np.float64
Array = np.ndarray

TINY = float(np.finfo(F).tiny)
# name of the kernel: (definition, smallest and largest argument)
FLOAT32: dict[str, tuple[Callable[[Array], Array], float, float]] = {
    "exp_float32": (definition.exp32, -math.inf, math.inf),
    "sigmoid_float32": (definition.sigmoid32, -math.inf, math.inf),
    "tanh_float32": (definition.tanh32, -math.inf, math.inf),
    "erf_float32": (definition.erf32, -math.inf, math.inf),
}
FLOAT64: dict[str, tuple[Callable[[Array], Array], float, float]] = {
    "exp_float64": (definition.exp64, -1e4, 1e4),
    "log_float64": (definition.log64, 1e-307, 1e308),
    "sigmoid_float64": (definition.sigmoid64, -1e4, 1e4),
    "softplus_float64": (definition.softplus64, -1e4, 1e4),
}
SPECIAL = [
    *(0.0, -0.0, 1.0, -1.0, 0.625, -0.625, 4.0, 1e-45, -1e-45, TINY),
    *(88.7, 89.5, -87.4, -103.9, -104.0, -105.0, 1e30),
]


def mapped(kernels: library.Kernels, name: str, x: Array) -> Array:
    y = np.empty_like(x)
    getattr(kernels, name)(*map(pointer, map(torch.from_numpy, (x, y))), x.size)
    return y


def arguments(low: float, high: float, dtype: type) -> Array:
    """Random bits, moderate numbers and special ones inside the domain."""
    rng = np.random.default_rng(0)
    whole = (np.uint32, F) if dtype is F else (np.uint64, D)
    bits = rng.integers(0, np.iinfo(whole[0]).max, 20_000, whole[0]).view(whole[1])
    moderate = (rng.standard_normal(20_000) * 10.0 ** rng.uniform(-3, 2, 20_000)).astype(dtype)
    x = np.concatenate([bits, moderate, np.array(SPECIAL, dtype)])
    return x[(x >= low) & (x <= high)]


@pytest.mark.parametrize("variant", ABLE, ids=[variant.name for variant in ABLE])
@pytest.mark.parametrize("name", [*FLOAT32, *FLOAT64])
def test_every_function_is_the_definition_bit_for_bit(name: str, variant: build.Variant) -> None:
    function, low, high = {**FLOAT32, **FLOAT64}[name]
    x = arguments(low, high, F if name in FLOAT32 else D)
    with np.errstate(all="ignore"):
        assert mapped(opened(variant), name, x).tobytes() == function(x).tobytes()


@pytest.mark.parametrize("variant", ABLE, ids=[variant.name for variant in ABLE])
def test_sine_and_cosine_are_the_definition_bit_for_bit(variant: build.Variant) -> None:
    x = np.concatenate([np.arange(0.0, 3000.0), np.random.default_rng(0).uniform(0, 2.0**20, 20_000)])
    sine, cosine = np.empty_like(x), np.empty_like(x)
    opened(variant).sin_cos_float64(*map(pointer, map(torch.from_numpy, (x, sine, cosine))), x.size)
    # + 0.0: the definition multiplies a zero by its sign
    assert [y.tobytes() for y in (sine + 0.0, cosine)] == [(y + 0.0).tobytes() for y in definition.sin_cos64(x)]


def ulps(found: Array, expected: Array) -> float:
    """The largest error in units in the last place of the float32 that is expected."""
    _, exponent = np.frexp(expected)
    return float((np.abs(found.astype(D) - expected) / 2.0 ** (np.maximum(exponent, -125) - 24)).max())


@pytest.mark.parametrize(
    ("name", "truth", "low", "high", "bound"),
    [
        ("exp_float32", np.exp, -103.0, 88.7, 1.01),
        ("sigmoid_float32", lambda x: 1 / (1 + np.exp(-x)), -88.0, 100.0, 2.5),
        ("tanh_float32", np.tanh, -100.0, 100.0, 1.4),
        ("erf_float32", lambda x: torch.erf(torch.from_numpy(x)).numpy(), -100.0, 100.0, 1.2),
    ],
)
def test_float32_functions_are_as_near_the_truth_as_is_said(
    name: str, truth: Callable[[Array], Array], low: float, high: float, bound: float
) -> None:
    x = arguments(low, high, F)
    assert 0.5 < ulps(mapped(library.load(), name, x), truth(x.astype(D))) <= bound


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        *(("exp", -20.0, 20.0), ("log", 1e-3, 1e3), ("sigmoid", -20.0, 20.0)),
        *(("softplus", -20.0, 20.0), ("sqrt", 1e-3, 1e3), ("tanh", -5.0, 5.0)),
    ],
)
def test_the_functions_for_a_users_loss_have_torchs_values_and_derivatives(name: str, low: float, high: float) -> None:
    x = torch.linspace(low, high, 1001, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    truth = torch.nn.functional.softplus if name == "softplus" else getattr(torch, name)
    found, expected = getattr(ppo_repro.numerics, name)(x), truth(wide)
    found.sum().backward()
    expected.sum().backward()
    assert x.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(found.double(), expected, rtol=4e-7, atol=1e-30)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=4e-6, atol=2e-7)


@pytest.mark.parametrize("name", ["exp", "log", "sigmoid", "softplus", "sqrt", "tanh"])
def test_a_second_derivative_is_refused(name: str) -> None:
    """It would be wrong, because the slope is computed without autograd."""
    x = torch.tensor([1.0], requires_grad=True)
    (slope,) = torch.autograd.grad(getattr(ppo_repro.numerics, name)(x).square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.backward()


def test_a_dtype_that_no_kernel_has_is_refused() -> None:
    with pytest.raises(TypeError, match="tanh takes float32 here, and got float64; convert it"):
        ppo_repro.numerics.tanh(torch.zeros(1, dtype=torch.float64))


def test_a_logarithm_outside_of_its_domain_is_torchs() -> None:
    x = torch.tensor([0.0, -1.0, math.inf, math.nan, 1e-42])
    torch.testing.assert_close(ppo_repro.numerics.log(x), torch.log(x), equal_nan=True)
