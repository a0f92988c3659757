"""Gaussian error linear units by kernels: bit for bit the eager specification, for every argument."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_repro.numerics.arithmetic.gates import LAST_TAIL, LIMIT
from ppo_repro.numerics.kernels import activations
from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.layers.activations import gated
from tests.support.cases.awkward import cases, matrix
from tests.support.cases.gelu import GATES, results
from tests.support.kernels import KINDS, both, seeds, threads, using, values
from tests.support.models import seeded, unequal


@pytest.mark.parametrize("name", GATES)
@settings(max_examples=60)
@given(cases, st.integers(1, 12), threads)
def test_kernels_are_the_specification(name: str, case: tuple[int, int, str], rows: int, count: int) -> None:
    size, seed, stride = case
    x, upstream = matrix(rows, size, seed, stride), matrix(rows, size, seed + 1, stride)
    expected, got = both(lambda: results(GATES[name], x, upstream), count)
    assert got == expected


@pytest.mark.parametrize("name", GATES)
@settings(max_examples=60)
@given(seeds, st.sampled_from(KINDS), st.integers(1, 300), threads)
def test_kernels_are_the_specification_for_numbers_of_every_size(
    name: str, seed: int, kind: str, n: int, c: int
) -> None:
    x, upstream = (torch.from_numpy(values(k, (n,), np.random.default_rng(seed))) for k in (kind, "any"))
    expected, got = both(lambda: results(GATES[name], x, upstream), c)
    assert got == expected


@pytest.mark.parametrize("name", GATES)
def test_kernels_are_the_specification_over_the_whole_range(name: str) -> None:
    every = np.arange(0, 1 << 32, 40_009, dtype=np.uint32).view(np.float32)
    near = np.linspace(-45.0, 45.0, 40_001).astype(np.float32)
    edges = np.array([2.0**-149, math.inf, math.nan, LIMIT, LAST_TAIL], np.float32).view(np.uint32)
    beside = (edges[:, None] - 1 + np.arange(3, dtype=np.uint32)).ravel().view(np.float32)
    x = torch.from_numpy(np.concatenate([every, near, beside, -beside]))
    assert x.isnan().any() and x.isinf().any()
    upstream = torch.randn(len(x), generator=seeded(0))
    expected, got = both(lambda: results(GATES[name], x, upstream), 2)
    assert got == expected


@kernel
def _normal_cdf(x, g, slope):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        g[i], slope[i] = activations._normal_cdf(x[i])


@kernel
def _tanh_gate(x, g, slope):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        g[i], slope[i] = activations._tanh_gate(x[i])


@kernel
def _quick_gate(x, g, slope):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        g[i], slope[i] = activations._quick_gate(x[i])


@pytest.mark.parametrize("name", GATES)
def test_gates_are_the_specification_before_they_are_rounded(name: str) -> None:
    """Rounding to float32 hides nearly every change of the last bits of float64, so gates are compared in float64."""
    near = torch.randn(20_000, generator=seeded(0), dtype=torch.float64) * 3.0
    x = torch.cat([near, torch.linspace(-LIMIT, LIMIT, 4_001, dtype=torch.float64), near * 1e-30])
    g, slope = torch.empty_like(x), torch.empty_like(x)
    {"erf": _normal_cdf, "tanh": _tanh_gate, "quick": _quick_gate}[name](x.numpy(), g.numpy(), slope.numpy())
    expected = GATES[name](x)
    assert unequal(g, expected[0]) == 0 and unequal(slope, expected[1]) == 0


@pytest.mark.parametrize("name", GATES)
def test_a_gradient_that_is_not_finite_stays_not_finite(name: str) -> None:
    x, upstream = torch.linspace(-2.0, 2.0, 9), torch.tensor([math.inf, -math.inf, math.nan] * 3)
    expected, got = both(lambda: results(GATES[name], x, upstream))
    assert got == expected
    with using("float64"):
        assert not results(GATES[name], x, upstream)[2].isfinite().any()


def test_another_gate_is_refused() -> None:
    with using("float64"), pytest.raises(KeyError):
        gated(torch.ones(3), lambda x: (x, x))
