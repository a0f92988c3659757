"""Intervals and tests: by hand, by slow definitions, against SciPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from ppo_repro.analysis import significance
from ppo_repro.analysis.significance import Estimate
from tests.support.statistics import array, rng


def test_sign_flip_by_hand_and_by_definition() -> None:
    # of the eight sums of +-1 +-2 +-3 two reach 6
    found = significance.sign_flip(array(1, 2, 3), rng())
    assert (found.stat, found.p_value, found.relabellings, found.exact) == (2.0, 0.25, 8, True)
    # sums of four signs: 0 in 6 of 16, else 2 or 4
    assert significance.sign_flip(array(1, 1, 1, -1), rng()).p_value == 10 / 16
    assert significance.sign_flip(array(0, 0), rng()).p_value == significance.sign_flip(array(3), rng()).p_value == 1.0
    values = rng(3).normal(0.4, 1, 9)
    sums = [abs(sum(s * v for s, v in zip(row, values, strict=True))) for row in itertools.product((1, -1), repeat=9)]
    assert significance.sign_flip(values, rng()).p_value == np.mean([x >= sums[0] - 1e-9 for x in sums])
    drawn = [significance.sign_flip(rng(1).normal(size=40), rng(seed), draws=99) for seed in (5, 5, 6, 7, 8)]
    assert drawn[0] == drawn[1]
    assert len({one.p_value for one in drawn}) > 1
    assert not drawn[0].exact


def test_welch_t_and_tost_by_hand() -> None:
    # s_a^2 / n_a = 1/3, s_b^2 / n_b = (20/3) / 4 = 5/3; df = 4 / ((1/9) / 2 + (25/9) / 3) = 216 / 53
    a, b = array(1, 2, 3), array(2, 4, 6, 8)
    found = significance.welch(a, b)
    assert (found.mean, found.se, found.df) == pytest.approx((3.0, math.sqrt(2), 216 / 53))
    scipys = stats.ttest_ind(b, a, equal_var=False)
    assert significance.t_test(found) == pytest.approx(scipys.pvalue)
    assert significance.t_interval(found, 0.9) == pytest.approx(tuple(scipys.confidence_interval(0.9)))
    one = significance.one_sample(array(1, 3))
    # Student's t with one degree of freedom is Cauchy's: 2 (1/2 - atan(2) / pi)
    assert significance.t_test(one) == pytest.approx(1 - 2 * math.atan(2) / math.pi)
    # two degrees of freedom: P(T >= 1) = 1/2 - 1 / (2 sqrt 3)
    assert significance.tost(Estimate(1.0, 1.0, 2.0), 2.0) == pytest.approx(0.5 - 0.5 / math.sqrt(3))
    assert significance.tost(significance.one_sample(array(0, 0, 0)), 1e-9) == 0.0
    assert significance.tost(significance.one_sample(array(1, 1)), 1.0) == 1.0
    assert math.isnan(significance.tost(significance.one_sample(array(1)), 5.0))
    with pytest.raises(ValueError, match="must be positive"):
        significance.tost(Estimate(0.0, 1.0, 2.0), 0.0)
    for values in (array(1, math.nan), array()):
        for call in (significance.one_sample, lambda v: significance.sign_flip(v, rng())):
            with pytest.raises(ValueError, match="only finite ones"):
                call(values)


def test_holm_by_hand() -> None:
    # 4 x 0.005, 3 x 0.01, 2 x 0.03, then 0.04, which may not be below 0.06
    assert significance.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert significance.holm([0.02, math.nan, 0.9, 0.8]) == pytest.approx([0.06, math.nan, 1.0, 1.0], nan_ok=True)
