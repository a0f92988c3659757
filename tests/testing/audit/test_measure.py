"""Properties of the audit's measure: rounding stays rounding in another order, with other signs, in another unit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.testing.audit.limits import FORMATS_APART, NO_CHANCE, OF_ERRORS, OF_ROUNDING, TOKEN_OVER_RMS
from ppo_repro.testing.audit.measure import (
    Stored,
    errors_of,
    is_rounding,
    likeness,
    rms,
)
from tests.support.models import seeded

SIZES = st.floats(1e-9, 1e3)
SEEDS = st.integers(0, 2**31)


def drawn(seed: int, size: float, count: int = 40) -> Tensor:
    """Errors with an rms of exactly `size`."""
    x = torch.randn(count, generator=seeded(seed), dtype=torch.float64)
    return size * x / x.square().mean().sqrt()


@given(seed=SEEDS, left=SIZES, before=SIZES, tolerance=SIZES, rounding=st.just(0.0) | SIZES)
def test_neither_order_nor_sign_nor_unit_of_errors_matters_and_smaller_errors_are_explained_too(
    seed: int, left: float, before: float, tolerance: float, rounding: float
) -> None:
    # at a limit, the order of the additions in an rms decides
    edges = (tolerance, OF_ERRORS * before, OF_ROUNDING * rounding)
    assume(not any(math.isclose(left, edge, rel_tol=1e-12) for edge in edges))
    x = drawn(seed, left)
    found = is_rounding(x, before, tolerance, rounding)
    assert is_rounding(-x.flip(0), before, tolerance, rounding) == found
    assert is_rounding(x * 2.0**-9, before * 2.0**-9, tolerance * 2.0**-9, rounding * 2.0**-9) == found
    if found:
        assert is_rounding(0.5 * x, before, tolerance, rounding)
        assert is_rounding(x, 2 * before, 2 * tolerance, 2 * rounding)
        assert left <= max(tolerance, OF_ROUNDING * rounding) * (1 + 1e-9)


@given(seed=SEEDS, size=SIZES, tolerance=SIZES, rounding=SIZES)
def test_a_cause_that_leaves_half_of_what_was_there_explains_nothing_but_its_own_rounding(
    seed: int, size: float, tolerance: float, rounding: float
) -> None:
    x = drawn(seed, size)
    assert not is_rounding(x, size, tolerance)
    assert not is_rounding(x, 1.99 * size, tolerance)
    assert is_rounding(x, math.inf, 1.01 * size)
    assert is_rounding(x, size, 0.0, rounding) == (rms(x) <= OF_ROUNDING * rounding)
    assert not is_rounding(x, size, 0.0, math.nan)
    assert not is_rounding(x, size, 0.0, math.inf)


@given(seed=SEEDS, size=SIZES)
def test_one_token_that_is_far_off_is_no_rounding(seed: int, size: float) -> None:
    x, tolerance = drawn(seed, size, 400), 2 * size
    assert is_rounding(x, math.inf, tolerance)
    x[7] = 1.1 * TOKEN_OVER_RMS * tolerance
    assert rms(x) < tolerance
    assert not is_rounding(x, math.inf, tolerance)


FORMATS = {
    Stored("bfloat16", 7): lambda x: x.float().bfloat16().double(),
    Stored("float16", 10): lambda x: x.half().double(),
    Stored("2 decimals", 0, 2): lambda x: x.round(decimals=2),
}


@pytest.mark.parametrize("stored", FORMATS, ids=lambda stored: stored.name)
@given(seed=SEEDS)
def test_rounding_to_the_stored_format_leaves_no_error_and_three_times_as_much_does(stored: Stored, seed: int) -> None:
    x = drawn(seed, 2.0)
    rounded = FORMATS[stored](x)
    assert not bool(errors_of(rounded, x, stored).any())
    assert rms(errors_of(rounded, x, Stored())) > 0.0, "the control"
    assert bool((errors_of(rounded, rounded + 3 * stored.half_spacing(rounded), stored) < 0).all())


@given(seed=SEEDS, size=st.floats(1e-6, 1.0), times=st.floats(0.1, 10.0))
def test_errors_are_like_16_bit_rounding_only_with_its_sign_and_its_size(seed: int, size: float, times: float) -> None:
    rounding, other = drawn(seed, size), drawn(seed + 1, size)
    found = likeness(times * rounding, rounding, rounding)
    assert found == (pytest.approx(1.0) if max(times, 1 / times) <= FORMATS_APART**0.5 else 0.0)
    assert likeness(-times * rounding, rounding, rounding) == 0.0
    unlike = other - rounding * (other @ rounding) / (rounding @ rounding)
    assert likeness(unlike, rounding, rounding) == 0.0
    # NO_CHANCE standard errors of a correlation of 40 numbers are 0.47
    for share, is_clear in ((0.8, True), (0.3, False)):
        mixed = share * rounding + (1 - share**2) ** 0.5 * unlike * (size / rms(unlike))
        assert (likeness(mixed, rounding, rounding) > 0.0) == is_clear == (share > NO_CHANCE / len(rounding) ** 0.5)
