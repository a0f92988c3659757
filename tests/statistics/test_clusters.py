"""Sums and means with standard errors by cluster: by hand, and against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.statistics import clusters
from tests.support.statistics import array

FLOATS = st.floats(-1e300, 1e300)


@given(st.lists(FLOATS, max_size=30))
def test_sums_are_exact(values: list[float]) -> None:
    expected = sum((Fraction(value) for value in values), Fraction())
    assert clusters.exact_sum(values) == float(expected) == clusters.exact_sum(values[::-1])


def test_ratios_by_hand() -> None:
    # m = 9 / 3 = 3; residuals 4 - 6 and 5 - 3; se = sqrt(2 / 1 * 8) / 3 = 4 / 3
    assert clusters.ratio_of_sums(array(4, 5), array(2, 1)) == (3.0, pytest.approx(4 / 3))
    # 2 and 5: 3.5, s = 3 / sqrt 2, se = 1.5
    assert clusters.mean(array(2, 5)) == (3.5, pytest.approx(1.5))
    assert clusters.mean(array(2)).value == 2.0
    assert math.isnan(clusters.mean(array(2)).se)
    assert math.isnan(clusters.mean(array()).value)
