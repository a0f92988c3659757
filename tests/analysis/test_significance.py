"""Tests of means, Holm, bootstrap, interquartile mean: by hand, by definition, properties, error rates."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.stats import power, resampling, significance
from analysis.stats.significance import Estimate
from tests.support.statistics import array, limits, rng

SOME = settings(max_examples=40)
NUMBERS = st.lists(st.integers(-50, 50).map(lambda x: x / 8), min_size=1, max_size=9)
SETS = 400


def test_sign_flip_by_hand() -> None:
    # of the eight sums of +-1 +-2 +-3 two reach 6
    found = significance.sign_flip(array(1, 2, 3), rng())
    assert (found.stat, found.p_value, found.n_units, found.relabellings, found.exact) == (2.0, 0.25, 3, 8, True)
    # sums of four signs: 0 in 6 of 16, else 2 or 4
    assert significance.sign_flip(array(1, 1, 1, -1), rng()).p_value == 10 / 16
    assert significance.sign_flip(array(0, 0), rng()).p_value == 1.0
    # tenths have no exact float64, yet sums that tie for whole numbers tie for them
    values = array(1, 2, -3, 5, 7, -1)
    assert significance.sign_flip(values / 10, rng()).p_value == significance.sign_flip(values, rng()).p_value


def test_sign_flip_by_definition() -> None:
    values = rng(3).normal(0.4, 1, 10)
    sums = [abs(sum(s * v for s, v in zip(row, values, strict=True))) for row in itertools.product((1, -1), repeat=10)]
    expected = np.mean([x >= sums[0] - 1e-9 for x in sums])
    assert significance.sign_flip(values, rng()).p_value == expected
    # drawn instead of enumerated: the same p within the limits of 20,000 draws
    many = np.concatenate([values, np.zeros(10)])
    drawn = significance.sign_flip(many, rng(), draws=20_000)
    low, high = limits(float(expected), 20_000)
    assert not drawn.exact and low <= drawn.p_value <= high
    # the observed signs are one of the possible ones: no p-value is 0
    assert significance.sign_flip(np.ones(40), rng(), draws=99).p_value == 0.01


@SOME
@given(NUMBERS, st.randoms(use_true_random=False))
def test_sign_flip_properties(values: list[float], random: object) -> None:
    found = significance.sign_flip(array(*values), rng())
    assert 0 < found.p_value <= 1
    assert significance.sign_flip(-array(*values), rng()).p_value == found.p_value
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert significance.sign_flip(array(*shuffled), rng()).p_value == found.p_value


def test_batches_are_seeded() -> None:
    values = rng(1).normal(size=40)
    p_values = [significance.sign_flip(values, rng(seed), draws=99).p_value for seed in (5, 5, 6, 7, 8)]
    assert p_values[0] == p_values[1] and len(set(p_values)) > 1


def test_welch_and_t_by_hand() -> None:
    # s_a^2 / n_a = 1/3, s_b^2 / n_b = (20/3) / 4 = 5/3; df = 4 / ((1/9) / 2 + (25/9) / 3) = 216 / 53
    a, b = array(1, 2, 3), array(2, 4, 6, 8)
    found = significance.welch(a, b)
    assert (found.mean, found.se, found.df) == pytest.approx((3.0, math.sqrt(2), 216 / 53))
    scipys = stats.ttest_ind(b, a, equal_var=False)
    assert significance.t_test(found) == pytest.approx(scipys.pvalue)
    assert significance.welch_p_values(a[None, :], b[None, :]) == pytest.approx([scipys.pvalue])
    assert significance.t_interval(found, 0.9) == pytest.approx(tuple(scipys.confidence_interval(0.9)))
    one = significance.one_sample(array(1, 3))
    assert (one.mean, one.se, one.df) == (2.0, 1.0, 1.0)
    # Student's t with one degree of freedom is Cauchy's: 2 (1/2 - atan(2) / pi)
    assert significance.t_test(one) == pytest.approx(1 - 2 * math.atan(2) / math.pi)


def test_tost_by_hand() -> None:
    # two degrees of freedom: P(T >= 1) = 1/2 - 1 / (2 sqrt 3)
    assert significance.tost(Estimate(1.0, 1.0, 2.0), 2.0) == pytest.approx(0.5 - 0.5 / math.sqrt(3))
    assert significance.tost(Estimate(2.0, 1.0, 2.0), 2.0) == 0.5
    assert significance.tost(significance.one_sample(array(0, 0, 0)), 1e-9) == 0.0
    assert significance.tost(significance.one_sample(array(1, 1)), 1.0) == 1.0
    assert math.isnan(significance.tost(significance.one_sample(array(1)), 5.0))
    with pytest.raises(ValueError, match="must be positive"):
        significance.tost(Estimate(0.0, 1.0, 2.0), 0.0)


@SOME
@given(st.floats(-3, 3), st.floats(0.1, 3), st.integers(1, 30), st.floats(0.01, 5), st.floats(0.01, 5))
def test_tost_properties(mean: float, se: float, df: int, margin: float, more: float) -> None:
    estimate = Estimate(mean, se, float(df))
    p_value = significance.tost(estimate, margin)
    assert 0 < p_value <= 1 and p_value == significance.tost(Estimate(-mean, se, float(df)), margin)
    assert significance.tost(estimate, margin + more) <= p_value
    # the larger of two one-sided tests
    sides = [stats.t.sf((margin + mean) / se, df), stats.t.sf((margin - mean) / se, df)]
    assert p_value == pytest.approx(max(sides))
    # the same decision as an interval of level 1 - 2 alpha inside the margin
    low, high = significance.t_interval(estimate, 0.9)
    assert (p_value < 0.05) == (-margin < low and high < margin)


def test_holm_by_hand() -> None:
    # 4 x 0.005, 3 x 0.01, 2 x 0.03, then 0.04, which may not be below 0.06
    assert significance.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert significance.holm([0.02, math.nan, 0.9, 0.8]) == pytest.approx([0.06, math.nan, 1.0, 1.0], nan_ok=True)
    assert len(significance.holm([])) == 0


@SOME
@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=8))
def test_holm_properties(p_values: list[float]) -> None:
    found, p = significance.holm(p_values), np.array(p_values)
    assert (found >= p).all() and (found <= 1).all() and (found <= np.minimum(1, p * len(p)) + 1e-15).all()
    assert (np.diff(found[np.argsort(p)]) >= 0).all()
    assert significance.holm(p_values[::-1]).tolist() == found[::-1].tolist()


def test_iqm_and_improvement_by_hand() -> None:
    assert resampling.iqm(array(8, 1, 7, 2, 6, 3, 5, 4)) == 4.5  # mean of 3, 4, 5, 6
    assert resampling.iqm(array(0, 1, 2, 3, 100)) == 2.0  # floor(5 / 4) = 1 off each end
    assert resampling.iqm(array(0, 9)) == 4.5
    values = rng(2).normal(size=(5, 23))
    assert resampling.iqm(values) == pytest.approx(stats.trim_mean(values, 0.25, axis=1))
    # 2 > 1, 2 = 2, 3 > 1, 3 > 2: 3.5 of 4; the second stratum: never
    first, second = (array(1, 2), array(2, 3)), (array(5, 5), array(1, 1))
    assert resampling.probability_of_improvement([first[0]], [first[1]]) == 3.5 / 4
    both = resampling.probability_of_improvement([first[0], second[0]], [first[1], second[1]])
    assert both == (3.5 / 4 + 0) / 2


def test_bootstraps_by_definition() -> None:
    sums, counts = rng(1).normal(1, 1, 12), rng(2).integers(1, 9, 12)
    found = resampling.cluster_bootstrap(sums, counts, rng(9), level=0.9, draws=50)
    places = rng(9).integers(0, 12, (50, 12))
    ratios = [sum(sums[i] for i in row) / sum(counts[i] for i in row) for row in places]
    assert found == pytest.approx((np.quantile(ratios, 0.05), np.quantile(ratios, 0.95)))
    a, b = [array(1, 2, 4), array(0, 5, 7)], [array(2, 2, 9), array(4, 5, 6)]
    value, low, high = resampling.stratified_bootstrap(a, b, resampling.mean_difference, rng(4), paired=True, draws=50)
    seeds = rng(4).integers(0, 3, (50, 3))
    means = [np.mean([(y - x)[row].mean() for x, y in zip(a, b, strict=True)]) for row in seeds]
    # mean of (1 + 0 + 5) / 3 and (4 + 0 - 1) / 3
    assert (value, low, high) == pytest.approx((1.5, *np.quantile(means, [0.025, 0.975])))
    with pytest.raises(ValueError, match="equally many seeds everywhere"):
        resampling.stratified_bootstrap([array(1)], [array(1, 2)], resampling.iqm_difference, rng(), paired=True)


def test_values_that_are_not_finite_are_refused() -> None:
    for values in (array(1, math.nan), array(math.inf), array()):
        for call in (significance.one_sample, lambda v: significance.sign_flip(v, rng())):
            with pytest.raises(ValueError, match="only finite ones"):
                call(values)


@pytest.mark.parametrize("n", [8, 20])
def test_sign_flip_error_rates(n: int) -> None:
    noise = rng(n).standard_normal((SETS, n))
    # 8 values: p is a multiple of 2 / 256, and 12 / 256 is the largest up to 0.05
    level = 12 / 256 if n == 8 else 0.05
    null = (significance.sign_flip_p_values(noise, rng(), draws=199) <= 0.05).mean()
    assert limits(level, SETS)[0] <= null <= limits(level, SETS)[1]
    assert (significance.sign_flip_p_values(noise + 1.5, rng(), draws=199) <= 0.05).mean() > 0.8


def test_welch_and_tost_error_rates() -> None:
    a, b = rng(1).standard_normal((SETS, 8)), 2 * rng(2).standard_normal((SETS, 9))
    null = (significance.welch_p_values(a, b) <= 0.05).mean()
    assert limits(0.05, SETS)[0] <= null <= limits(0.05, SETS)[1]
    assert (significance.welch_p_values(a, b + 4) <= 0.05).mean() > 0.9
    # at the margin itself two runs are called equivalent as often as alpha, well inside it nearly always
    edge = np.mean([significance.tost(significance.one_sample(x + 1), 1.0) <= 0.05 for x in a])
    assert limits(0.05, SETS)[0] <= edge <= limits(0.05, SETS)[1]
    assert np.mean([significance.tost(significance.one_sample(x), 2.0) <= 0.05 for x in a]) > 0.9


def test_clusters_need_a_cluster_bootstrap() -> None:
    """Items of a cluster share an effect: over clusters the interval holds the truth, over items it is too narrow."""
    held, naive = 0, 0
    for seed in range(200):
        noise = rng(seed)
        items = noise.standard_normal((40, 1)) + 0.3 * noise.standard_normal((40, 10))
        low, high = resampling.cluster_bootstrap(items.sum(axis=1), np.full(40, 10), noise, draws=199)
        held += low <= 0 <= high
        low, high = resampling.cluster_bootstrap(items.ravel(), np.full(400, 1), noise, draws=199)
        naive += low <= 0 <= high
    # a percentile interval of 40 clusters covers a little less than 95 %
    assert limits(0.93, 200)[0] <= held / 200 and naive / 200 < limits(0.93, 200)[0]


def test_power_by_hand_and_simulation() -> None:
    # 2 / 2**5 = 0.0625: five pairs never reach 0.05, six pairs have 2 / 64
    assert power.minimum_detectable_effect(1.0, 5, rng(), paired=True) == math.inf
    assert power.null_rejection_rate(5, rng(), paired=True) == 0.0
    effect = power.minimum_detectable_effect(2.0, 10, rng(), paired=False, datasets=1000)
    # Student's formula for two groups of ten, power 0.8, is about sd (t_18,0.975 + t_18,0.8) sqrt(2 / 10) = 2.65
    scale = (stats.t.ppf(0.975, 18) + stats.t.ppf(0.8, 18)) * math.sqrt(2 / 10)
    assert effect == pytest.approx(2 * scale, rel=0.1)  # 1,000 simulated sets, and an approximation beside them
    a, b = rng(5).standard_normal((1000, 10)), rng(6).standard_normal((1000, 10))
    seen = (significance.welch_p_values(2 * a, 2 * b + effect) <= 0.05).mean()
    assert limits(0.8, 1000)[0] - 0.04 <= seen <= limits(0.8, 1000)[1] + 0.04  # the effect has its own error
    rate = power.null_rejection_rate(10, rng(), paired=False)
    assert limits(0.05, 500)[0] <= rate <= limits(0.05, 500)[1]
    assert math.isnan(power.minimum_detectable_effect(0.0, 9, rng(), paired=True))
    assert math.isnan(power.split_rejection_rate(array(1, 2, 3), rng()))
    # halves of one half zeros and one half ones: 1,1 against 0,0 has no spread, all others overlap
    assert power.split_rejection_rate(array(0, 0, 1, 1), rng()) == 0.0
