"""Merged statistics are those of the whole, to the last bit, and within the stated errors of the definition."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.stats import exact_sums

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
MAGNITUDES = st.floats(2.0**-149, 2.0**129)


def exact(values: list[float]) -> Fraction:
    return sum((Fraction(value) for value in values), Fraction())


@given(st.lists(FLOATS, max_size=30), st.integers(0, 30))
def test_sums_are_exact_and_so_are_merged_ones(values: list[float], cut: int) -> None:
    array = np.array(values, dtype=np.float64)
    (whole,) = exact_sums.exact_sums(array[None])
    assert Fraction(whole.units, 1 << 1126) == exact(values)
    parts = [exact_sums.exact_sums(part[None])[0] for part in (array[:cut], array[cut:])]
    assert exact_sums.add(*parts) == whole
    if abs(exact(values)) < Fraction(2) ** 1023:
        assert exact_sums.value(whole) == float(exact(values))


def test_a_sum_that_floats_lose() -> None:
    (found,) = exact_sums.exact_sums(np.array([[1e300, 1.0, 5e-324, -1e300]]))
    assert exact_sums.value(found) == 1.0
    assert Fraction(found.units, 1 << 1126) == 1 + Fraction(5e-324)


@given(st.integers(1, 2**26 - 1))
def test_halves_that_are_opposite_numbers_do_not_cancel(half: int) -> None:
    # of mantissas, the upper halves add up to -half and the lower ones to +half
    numbers = [float(1 << 52), -float((1 << 52) + (half << 26) - half)]
    (found,) = exact_sums.exact_sums(np.array([numbers]))
    assert exact_sums.value(found) == float(half - (half << 26))


@pytest.mark.parametrize(
    ("values", "expected"),
    [([math.inf, 1.0], math.inf), ([-math.inf], -math.inf), ([math.inf, -math.inf], math.nan), ([math.nan], math.nan)],
)
def test_what_is_not_finite_stays_it(values: list[float], expected: float) -> None:
    with np.errstate(invalid="ignore"):
        (found,) = exact_sums.exact_sums(np.array([values]))
    assert exact_sums.value(found) == pytest.approx(expected, nan_ok=True)


def test_cluster_means_by_hand() -> None:
    # two clusters: 1 and 3 (two items), 5 (one item)
    sums = exact_sums.cluster_sums({"y": np.array([4.0, 5.0])}, np.array([2, 1]))
    # m = 9 / 3 = 3; residuals 4 - 6 and 5 - 3; se = sqrt(2 / 1 * 8) / 3 = 4 / 3
    assert exact_sums.item_mean(sums, "y") == exact_sums.Estimate(3.0, 4.0 / 3.0)
    # cluster means 2 and 5: 3.5, s = 3 / sqrt 2, se = 1.5
    assert exact_sums.cluster_mean(sums, "y") == exact_sums.Estimate(3.5, 1.5)
    # cluster sums 4 and 5: 4.5, se = 0.5
    assert exact_sums.cluster_sum_mean(sums, "y") == exact_sums.Estimate(4.5, 0.5)


def test_one_cluster_has_no_error_and_none_has_no_mean() -> None:
    one = exact_sums.cluster_sums({"y": np.array([4.0])}, np.array([2]))
    assert exact_sums.item_mean(one, "y").value == 2.0
    assert math.isnan(exact_sums.item_mean(one, "y").se)
    none = exact_sums.cluster_sums({"y": np.zeros(0)}, np.zeros(0, np.int64))
    for mean in (exact_sums.item_mean, exact_sums.cluster_mean, exact_sums.cluster_sum_mean):
        assert math.isnan(mean(none, "y").value)


CLUSTERS = st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 9)), min_size=2, max_size=20)


@given(CLUSTERS, st.integers(0, 20))
def test_cluster_sums_do_not_depend_on_the_cut(clusters: list[tuple[float, int]], cut: int) -> None:
    y, n = np.array([c[0] for c in clusters]), np.array([c[1] for c in clusters])
    whole = exact_sums.cluster_sums({"y": y}, n)
    parts = [exact_sums.cluster_sums({"y": y[s]}, n[s]) for s in (slice(None, cut), slice(cut, None))]
    assert exact_sums.merge_clusters(parts[0], parts[1]) == whole
    order = np.argsort(y)
    assert exact_sums.cluster_sums({"y": y[order]}, n[order]) == whole


@given(CLUSTERS)
def test_standard_errors_are_those_of_the_definition(clusters: list[tuple[float, int]]) -> None:
    y, n = np.array([c[0] for c in clusters]), np.array([c[1] for c in clusters])
    sums, count = exact_sums.cluster_sums({"y": y}, n), len(y)
    mean = y.sum() / n.sum()
    # the squares Y^2 are rounded once each: 1e-8 of the rms
    scale = 1e-7 * (1.0 + np.abs(y).max())
    expected = math.sqrt(count / (count - 1) * ((y - mean * n) ** 2).sum()) / n.sum()
    assert exact_sums.item_mean(sums, "y").se == pytest.approx(expected, rel=1e-9, abs=scale)
    assert exact_sums.cluster_mean(sums, "y").value == pytest.approx((y / n).mean(), rel=1e-12, abs=1e-12)
    assert exact_sums.cluster_mean(sums, "y").se == pytest.approx(
        (y / n).std(ddof=1) / math.sqrt(count), rel=1e-9, abs=scale
    )


def test_the_cluster_error_covers_what_the_item_error_misses() -> None:
    # items are equal within a cluster, so 10,000 items say no more than 100 draws
    generator = np.random.default_rng(0)
    means = []
    for _ in range(400):
        y = 100.0 * generator.standard_normal(100)
        means.append(exact_sums.item_mean(exact_sums.cluster_sums({"y": y}, np.full(100, 100)), "y"))
    spread = np.std([mean.value for mean in means])
    # 400 draws estimate a standard deviation within 3.5 % (one sigma); four sigma
    assert np.mean([mean.se for mean in means]) == pytest.approx(spread, rel=0.15)
    assert spread > 5 * 1.0 / math.sqrt(100 * 100)


@given(st.lists(st.one_of(st.just(0.0), MAGNITUDES), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_those_of_the_sorted_values(values: list[float], q: float) -> None:
    counts = exact_sums.histogram(np.array(values))
    expected = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    assert exact_sums.quantile(counts, q) == pytest.approx(expected, rel=exact_sums.QUANTILE_ERROR, abs=0.0)
    assert counts.sum() == len(values)


@given(st.lists(MAGNITUDES, max_size=30), st.integers(0, 30))
def test_histograms_and_extremes_of_parts_add_up(values: list[float], cut: int) -> None:
    array = np.array(values, dtype=np.float64)
    assert (exact_sums.histogram(array[:cut]) + exact_sums.histogram(array[cut:]) == exact_sums.histogram(array)).all()
    merged = exact_sums.merge_extremes(exact_sums.extremes(array[:cut]), exact_sums.extremes(array[cut:]))
    assert merged == exact_sums.extremes(array)


def test_small_integers_have_bins_of_their_own() -> None:
    for k in range(256):
        assert math.floor(exact_sums.quantile(exact_sums.histogram(np.array([float(k)])), 0.5)) == k


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, 2.0**130, 2.0**-151])
def test_a_histogram_refuses_what_it_has_no_bin_for(value: float) -> None:
    with pytest.raises(ValueError, match="a histogram holds zeros and values from"):
        exact_sums.histogram(np.array([value]))


def test_quantiles_of_nothing() -> None:
    assert math.isnan(exact_sums.quantile(exact_sums.histogram(np.zeros(0)), 0.5))
