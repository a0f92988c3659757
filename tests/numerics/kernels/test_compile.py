"""Parts of kernels have no machine code of their own, are rounded as written, and are kept with the kernel."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from ppo_repro.numerics.kernels.core.compile import exact_sum, kernel, kernel_part


@exact_sum
def _dot(a, b):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@kernel_part
def _affine(a, factor, offset, out):  # type: ignore[no-untyped-def]
    for i in range(a.size):
        out[i] = a[i] * factor + offset


@kernel_part
def _scratch(a, factor, offset):  # type: ignore[no-untyped-def]
    out = np.empty(a.size)
    _affine(a, factor, offset, out)
    return out


@kernel
def _whole(a, b, factor, offset):  # type: ignore[no-untyped-def]
    """A part twice, once within another, and an exact sum."""
    again = np.empty(a.size)
    _affine(a, factor, offset, again)
    return _scratch(a, factor, offset), again, _dot(a, b)


A, B = np.random.default_rng(0).normal(size=77), np.arange(77) % 5 - 2.0
FACTOR, OFFSET = 1.1, -0.3


def test_a_part_is_rounded_as_written() -> None:
    one, other, total = _whole(A, B, FACTOR, OFFSET)
    assert one.tobytes() == other.tobytes() == (A * FACTOR + OFFSET).tobytes()
    fused = [float(Fraction(x) * Fraction(FACTOR) + Fraction(OFFSET)) for x in A.tolist()]
    assert one.tolist() != fused  # so a product and a sum in one instruction would have been seen
    # float64 adds these up with an error of at most 77 roundings of sums below 200
    assert total == pytest.approx(float(sum(Fraction(x) * Fraction(y) for x, y in zip(A, B, strict=True))), abs=1e-12)


def test_exact_sums_lose_no_bit_in_any_order() -> None:
    integers = np.random.default_rng(1).integers(-(2**20), 2**20, 1000)
    assert _whole(integers.astype(float), integers[::-1].astype(float), FACTOR, OFFSET)[2] == integers @ integers[::-1]


def test_a_kernel_comes_from_the_disk_without_its_parts() -> None:
    expected = _whole(A, B, FACTOR, OFFSET)
    loaded = kernel(_whole.py_func)
    one, other, total = loaded(A, B, FACTOR, OFFSET)
    assert sum(loaded.stats.cache_hits.values()) == 1 and not loaded.stats.cache_misses
    assert (one.tobytes(), other.tobytes(), total) == (expected[0].tobytes(), expected[1].tobytes(), expected[2])


def test_python_cannot_call_a_part() -> None:
    with pytest.raises(TypeError, match="not callable"):
        _affine(A, FACTOR, OFFSET, np.empty(A.size))
    with pytest.raises(TypeError, match="not callable"):
        _dot(A, B)
