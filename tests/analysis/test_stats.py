"""Sums, intervals, tests and survival: by hand, by slow definitions, against SciPy, and their error rates."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from analysis.stats import clusters, resampling, significance, survival, two_sample
from analysis.stats.significance import Estimate
from tests.support.statistics import array, limits, rng

ONE_PROMPT = np.zeros(2, np.int64)
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
    assert clusters.mean(array(2)).value == 2.0 and math.isnan(clusters.mean(array(2)).se)
    assert math.isnan(clusters.mean(array()).value)


def test_sign_flip_by_hand_and_by_definition() -> None:
    # of the eight sums of +-1 +-2 +-3 two reach 6
    found = significance.sign_flip(array(1, 2, 3), rng())
    assert (found.stat, found.p_value, found.n_units, found.relabellings, found.exact) == (2.0, 0.25, 3, 8, True)
    # sums of four signs: 0 in 6 of 16, else 2 or 4
    assert significance.sign_flip(array(1, 1, 1, -1), rng()).p_value == 10 / 16
    assert significance.sign_flip(array(0, 0), rng()).p_value == significance.sign_flip(array(3), rng()).p_value == 1.0
    values = rng(3).normal(0.4, 1, 9)
    sums = [abs(sum(s * v for s, v in zip(row, values, strict=True))) for row in itertools.product((1, -1), repeat=9)]
    assert significance.sign_flip(values, rng()).p_value == np.mean([x >= sums[0] - 1e-9 for x in sums])
    drawn = [significance.sign_flip(rng(1).normal(size=40), rng(seed), draws=99) for seed in (5, 5, 6, 7, 8)]
    assert drawn[0] == drawn[1] and len({one.p_value for one in drawn}) > 1 and not drawn[0].exact


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


def test_bootstraps_by_hand_and_by_definition() -> None:
    # the middle half of 0 1 2 3 and of 4 5 6 7
    assert resampling.iqm_difference([array(0, 3), array(1, 2)], [array(4, 5, 6, 7)]) == 5.5 - 1.5
    # 2 > 1, 2 = 2, 3 > 1, 3 > 2: 3.5 of 4; the second stratum: never
    a, b = [array(1, 2), array(5, 5)], [array(2, 3), array(1, 1)]
    assert resampling.probability_of_improvement(a, b) == (3.5 / 4 + 0) / 2
    sums, counts = rng(1).normal(1, 1, 40), rng(2).integers(1, 9, 40)
    found = resampling.cluster_bootstrap(sums, counts, rng(9), level=0.9, draws=4000)
    places = rng(3).integers(0, 40, (4000, 40))
    ratios = [sums[row].sum() / counts[row].sum() for row in places]
    assert found == pytest.approx((np.quantile(ratios, 0.05), np.quantile(ratios, 0.95)), rel=0.1)
    # paired: both have the same differences whatever seeds are drawn, so the interval has no width
    x = rng(4).normal(size=12)
    value, low, high = resampling.stratified_bootstrap(
        [x], [x + 1], lambda a, b, axis: b[0].mean(axis) - a[0].mean(axis), rng(), paired=True, draws=99
    )
    assert (value, low, high) == pytest.approx((1.0, 1.0, 1.0))
    _, low, high = resampling.stratified_bootstrap(
        [x], [x + 1], lambda a, b, axis: b[0].mean(axis) - a[0].mean(axis), rng(), paired=False, draws=99
    )
    assert high - low > 0.5


def ids(*rows: list[int]) -> npt.NDArray[np.int64]:
    return np.array(rows, np.int64)


def test_mmd_and_energy_by_hand() -> None:
    # as observed k is 1 within and 0 between: MMD^2 = 2; swapped or not with probability 1/2: mean 1
    found = two_sample.mmd_hamming(ids([1, 1], [1, 1]), ids([2, 2], [2, 2]), ONE_PROMPT, ONE_PROMPT, rng(), paired=True)
    assert found.stat == pytest.approx(1.0, abs=0.15) and limits(0.5, 999)[0] <= found.p_value <= limits(0.5, 999)[1]
    same = two_sample.mmd_hamming(ids([1, 3], [2, 4]), ids([1, 3], [2, 4]), ONE_PROMPT, ONE_PROMPT, rng(), paired=True)
    assert (same.stat, same.p_value, same.n_units) == (0.0, 1.0, 4)
    # 2 x 1 - 0 - 0 = 2; with one pair swapped 2 x 1/2 - 1/2 - 1/2 = 0
    found = two_sample.energy_distance(array(0, 0), array(1, 1), rng(), paired=True)
    assert found.stat == pytest.approx(1.0, abs=0.15) and found.n_units == 4
    x, y = rng(1).normal(size=300), rng(2).normal(0.5, 1, 300)
    found = two_sample.energy_distance(x, y, rng(), paired=False, draws=400)
    # SciPy's is the square root; the mean over relabellings is small beside it
    assert found.stat == pytest.approx(stats.energy_distance(x, y) ** 2, rel=0.15) and found.p_value == 1 / 401
    padded = two_sample.padded([np.array([5, 6], np.int32), np.array([], np.int32)], 2)
    assert padded.tolist() == [[5, 6], [-1, -1]]


def test_survival_by_hand() -> None:
    events = np.array([True, True, False, True, False])
    found = survival.kaplan_meier(np.array([1, 2, 2, 3, 4]), events)
    # 4/5; then 3/4 of it; then 1/2 of that
    assert found["time"].tolist() == [1, 2, 3] and found["survival"].tolist() == pytest.approx([0.8, 0.6, 0.3])
    # E of a: 1/2 at 1, 2/3 at 2, 0 at 3, against 2; V = 1/4 + 2/9
    yes = np.array([True, True])
    test = stats.logrank(survival.censored(np.array([1, 2]), yes), survival.censored(np.array([2, 3]), yes))
    assert test.statistic**2 == pytest.approx((5 / 6) ** 2 / (1 / 4 + 2 / 9))
    # one event in five tokens: exp(-m) = 0.975, and (1 + m) exp(-m) = 0.025 at m = 5.5716
    rate, low, high = survival.hazard(np.array([2, 3]), np.array([True, False]))
    assert (rate, low, high) == pytest.approx((0.2, -math.log(0.975) / 5, 5.5716434 / 5))
    assert survival.hazard(np.array([4]), np.array([False]))[:2] == (0.0, 0.0)
