"""The fused optimizer step equals the eager code bit for bit, and is as accurate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import gradients
from ppo_repro.numerics.kernels import optimizer as kernels
from ppo_repro.numerics.optim.adamw import AdamWSettings, ExactAdamW, exact_norm
from ppo_repro.numerics.optim.optimizer import ExactOptimizer, weights_digest
from tests.support.kernels import KINDS, both, seeds, threads, using, values
from tests.support.models import unequal
from tests.support.optimizer import backward_of, linear_model, steps

SIZES = st.sampled_from([1, 2, 7, 16, 33, 1000, 70_001])


adamw_settings = st.builds(
    AdamWSettings,
    st.sampled_from([0.0, 1e-6, 1e-2]),
    st.sampled_from([0.0, 0.9]),
    st.sampled_from([0.95, 0.999]),
    st.sampled_from([1e-8, 1e-5]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([1e-3, 1.0, math.inf]),
)


@settings(max_examples=150)
@given(seeds, SIZES, st.sampled_from(KINDS), adamw_settings, threads)
def test_kernels_equal_the_eager_code(seed: int, size: int, kind: str, optimizer: AdamWSettings, count: int) -> None:
    expected, got = both(lambda: steps(seed, size, kind, optimizer), count)
    assert expected == got


@pytest.mark.long
@pytest.mark.timeout(3000)
@settings(max_examples=1500)
@given(seeds, SIZES, st.sampled_from(KINDS), adamw_settings, threads)
def test_kernels_equal_the_eager_code_in_many_cases(
    seed: int, size: int, kind: str, optimizer: AdamWSettings, count: int
) -> None:
    expected, got = both(lambda: steps(seed, size, kind, optimizer), count)
    assert expected == got


@settings(max_examples=100)
@given(seeds, SIZES, st.integers(-200, 60), threads)
def test_the_conversion_of_gradients_equals_the_eager_code(seed: int, size: int, exponent: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    integers = torch.from_numpy(rng.integers(-(2**62), 2**62, size) >> rng.integers(0, 62, size))
    expected, got = both(lambda: [gradients._to_float32(integers.clone(), None, 2.0**exponent)], count)
    assert expected == got
    for dtype in (torch.int32, torch.int64):
        high = torch.from_numpy(rng.integers(-(2**31), 2**31, size)).to(dtype)
        expected, got = both(lambda: [gradients._to_float32(integers.clone(), high, 2.0**exponent)], count)  # noqa: B023
        assert expected == got


@settings(max_examples=100)
@given(seeds, SIZES, st.sampled_from(KINDS), threads)
def test_the_sum_of_squares_is_that_of_python_integers(seed: int, size: int, kind: str, count: int) -> None:
    x = values(kind, (size,), np.random.default_rng(seed))
    with using("float64", count):
        largest = kernels.largest(x)
        assert largest == float(np.abs(x).max())
        shift = 26 - math.frexp(largest)[1]
        if largest and -900 < shift < 900:
            expected = sum(int(i) ** 2 for i in np.rint(x.astype(np.float64) * 2.0**shift).tolist())
            assert kernels.sum_of_squares(x, shift) == expected


def test_many_of_the_largest_squares_stay_exact() -> None:
    x = np.full(300_000, -1.0, np.float32)
    assert kernels.sum_of_squares(x, 26) == 300_000 << 52
    x[7] = 1.0 - 2.0**-24
    assert kernels.sum_of_squares(x, 26) == (299_999 << 52) + (2**26 - 4) ** 2


def test_kernels_are_as_accurate_as_float64() -> None:
    rng = np.random.default_rng(0)
    c = kernels.StepConstants(0.3, 0.9, 0.1, 0.95, 0.05, 0.2, 1e-8, 0.999, 1e-2)
    w, g, m, s = (rng.standard_normal(10_000).astype(np.float32) for _ in range(4))
    s = np.abs(s)
    w64, g64, m64, s64 = (x.astype(np.float64) for x in (w, g * np.float32(1), m, s))
    kernels.adamw(w, g, m, s, c.as_float32())
    g64 = g64 * 0.3
    m64 = m64 * 0.9 + g64 * 0.1
    s64 = s64 * 0.95 + g64**2 * 0.05
    w64 = w64 * 0.999 - m64 / (np.sqrt(s64) / 0.2 + 1e-8) * 1e-2
    # a few float32 roundings each of numbers near 1
    assert np.abs(m - m64).max() < 1e-6 and np.abs(s - s64).max() < 1e-6 and np.abs(w - w64).max() < 1e-6


def test_other_roundings_of_a_step_differ() -> None:
    """The negative control: the same step in float64, rounded once."""
    step, generator = AdamWSettings(1e-2, 0.9, 0.95, 1e-8, 0.1, math.inf), torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(1, 1000, generator=generator) for _ in range(2))
    wide, g = weight.double(), gradient.double()
    # the first moments over 1 - beta are the gradient and its square
    once = (wide * (1 - 1e-2 * 0.1) - 1e-2 * g / (g.abs() + 1e-8)).float()
    with using("float64"):
        ExactAdamW({"weight": weight}).apply(step, {"weight": gradient}, 1.0)
    assert unequal(weight, once) > 10
    # two roundings of one step of 1e-2
    assert torch.allclose(weight, once, rtol=0, atol=1e-6)


def test_whole_steps_are_those_of_the_eager_code_and_layers_see_new_weights() -> None:
    x, runs = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)), []
    for name in ("eager", "float64"):
        with using(name):
            model, outputs = linear_model(), []
            optimizer = ExactOptimizer(model, AdamWSettings(1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0))
            for factor in (1.0, 5.0, 0.1):
                report = optimizer.step(backward_of(model, factor), 20)
                outputs += [weights_digest(model.named_parameters()), report, model(x).tolist()]
        runs.append(outputs)
    assert runs[0] == runs[1]
    assert runs[0][2] != runs[0][5]


@pytest.mark.parametrize("name", ["eager", "float64"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_norm_of_gradients_that_are_not_finite_is_an_error(name: str, bad: float) -> None:
    gradient = torch.zeros(100)
    gradient[71] = bad
    with using(name), pytest.raises(NumericsError, match="not finite"):
        exact_norm([gradient])
