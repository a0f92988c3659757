"""MMD of responses, energy distance, survival: by hand, by definition, properties, error rates."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.stats import survival, two_sample
from analysis.stats.two_sample import Ints
from ppo_repro.errors import UserError
from tests.support.statistics import array, limits, rng

SOME = settings(max_examples=30)
SETS = 200
ONE_PROMPT = np.zeros(2, np.int64)


def ids(*rows: list[int]) -> Ints:
    return np.array(rows, np.int64)


def mmd_by_definition(a: Ints, b: Ints, strata: npt.NDArray[np.int64]) -> float:
    def k(x: Ints, y: Ints) -> float:
        return sum(int(p == q) for p, q in zip(x, y, strict=True)) / len(x)

    total = 0.0
    for stratum in set(strata.tolist()):
        x, y = a[strata == stratum], b[strata == stratum]
        of = [np.mean([k(p, q) for p in u for q in v]) for u, v in ((x, x), (y, y), (x, y))]
        total += (of[0] + of[1] - 2 * of[2]) * len(x) / len(a)
    return float(total)


def test_padding() -> None:
    found = two_sample.padded([np.array([5, 6], np.int32), np.array([], np.int32), np.array([7], np.int32)], 2)
    assert found.tolist() == [[5, 6], [-1, -1], [7, -1]]
    with pytest.raises(ValueError, match="2 tokens does not fit into 1 columns"):
        two_sample.padded([np.array([5, 6], np.int32)], 1)


def test_mmd_by_hand() -> None:
    # as observed k is 1 within and 0 between: MMD^2 = 2; with one pair swapped all means are 1/2: 0
    found = two_sample.mmd_hamming(ids([1, 1], [1, 1]), ids([2, 2], [2, 2]), ONE_PROMPT, ONE_PROMPT, rng(), paired=True)
    assert (found.stat, found.p_value, found.n_units, found.relabellings) == (1.0, 0.5, 4, 4)
    same = two_sample.mmd_hamming(ids([1, 3], [2, 4]), ids([1, 3], [2, 4]), ONE_PROMPT, ONE_PROMPT, rng(), paired=True)
    assert (same.stat, same.p_value) == (0.0, 1.0)


def test_mmd_by_definition() -> None:
    a, b = rng(1).integers(0, 3, (8, 4)), rng(2).integers(0, 2, (8, 4))
    strata = np.array([0, 1, 1, 0, 0, 1, 1, 1])
    null = []
    for row in itertools.product((False, True), repeat=8):
        swap = np.array(row)[:, None]
        null.append(mmd_by_definition(np.where(swap, b, a), np.where(swap, a, b), strata))
    found = two_sample.mmd_hamming(a, b, strata, strata, rng(), paired=True)
    assert found.stat == pytest.approx(null[0] - np.mean(null))
    assert found.p_value == np.mean(np.array(null) >= null[0] - 1e-9)


def test_unpaired_mmd_by_definition() -> None:
    a, b = rng(1).integers(0, 3, (3, 4)), rng(2).integers(0, 2, (4, 4))
    both, null = np.concatenate([a, b]), []
    for chosen in itertools.combinations(range(7), 3):
        rest = [i for i in range(7) if i not in chosen]
        kernel = (both[:, None] == both[None]).mean(axis=2)
        w = np.zeros(7)
        w[list(chosen)], w[rest] = 1 / 3, -1 / 4
        null.append(w @ kernel @ w)
    expected = float(np.mean(np.array(null) >= null[0] - 1e-9))
    found = two_sample.mmd_hamming(a, b, np.zeros(3, int), np.zeros(4, int), rng(), paired=False, draws=20_000)
    low, high = limits(expected, 20_000)
    assert low <= found.p_value <= high
    # 0.01: the mean of 20,000 relabellings of numbers up to 2 is known to about 0.003
    assert found.stat == pytest.approx(null[0] - np.mean(null), abs=0.01)


def test_prompts_that_say_nothing() -> None:
    a, b = rng(1).integers(0, 3, (5, 2)), rng(2).integers(0, 3, (5, 2))
    strata = np.array([0, 0, 1, 2, 2])
    found = two_sample.mmd_hamming(a, b, strata, strata, rng(), paired=True)
    kept = np.array([0, 1, 3, 4])
    without = two_sample.mmd_hamming(a[kept], b[kept], strata[kept], strata[kept], rng(), paired=True)
    assert found == without and found.n_units == 8
    alone = two_sample.mmd_hamming(a, b, np.arange(5), np.arange(5), rng(), paired=True)
    assert math.isnan(alone.stat) and math.isnan(alone.p_value) and alone.n_units == 0
    many = np.zeros((2100, 1), np.int64)
    with pytest.raises(UserError, match="4200 responses to one prompt, at most 4096"):
        two_sample.mmd_hamming(many, many, many[:, 0], many[:, 0], rng(), paired=True)
    with pytest.raises(ValueError, match="the same width, and pairs the same stratum"):
        two_sample.mmd_hamming(a, b, strata, strata[::-1], rng(), paired=True)


def test_energy_by_hand() -> None:
    # 2 x 1 - 0 - 0 = 2; with one pair swapped 2 x 1/2 - 1/2 - 1/2 = 0
    found = two_sample.energy_distance(array(0, 0), array(1, 1), rng(), paired=True)
    assert (found.stat, found.p_value, found.n_units) == (1.0, 0.5, 4)


@SOME
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=1, max_size=6))
def test_energy_by_definition(pairs: list[tuple[int, int]]) -> None:
    a, b = (np.array(x, np.float64) for x in zip(*pairs, strict=True))

    def distance(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> float:
        gap = lambda u, v: np.mean([abs(p - q) for p in u for q in v])  # noqa: E731
        return float(2 * gap(x, y) - gap(x, x) - gap(y, y))

    null = []
    for row in itertools.product((False, True), repeat=len(a)):
        null.append(distance(np.where(row, b, a), np.where(row, a, b)))
    found = two_sample.energy_distance(a, b, rng(), paired=True)
    assert found.stat == pytest.approx(null[0] - np.mean(null))
    assert found.p_value == np.mean(np.array(null) >= null[0] - 1e-9)
    assert 0 < found.p_value <= 1
    swapped = two_sample.energy_distance(b, a, rng(), paired=True)
    assert (swapped.stat, swapped.p_value) == (pytest.approx(found.stat), found.p_value)
    turned = two_sample.energy_distance(a[::-1], b[::-1], rng(), paired=True)
    assert (turned.stat, turned.p_value) == (pytest.approx(found.stat), found.p_value)


def test_error_rates_while_policies_move() -> None:
    """Responses of later iterations are others, and both runs share half of their noise: pairs may still be swapped."""
    strata, moving = np.repeat(np.arange(5), 4), np.tile(np.linspace(0.1, 0.9, 4), 5)[:, None]
    rejected = 0
    for seed in range(SETS):
        noise = rng(seed)
        prompt, shared = noise.integers(0, 3, (5, 6))[strata], noise.random((20, 6))
        drawn = [np.where(noise.random((20, 6)) < 0.5, shared, noise.random((20, 6))) for _ in "ab"]
        a, b = (np.where(u < moving, prompt, 3 + np.floor(3 * u).astype(int)) for u in drawn)
        rejected += two_sample.mmd_hamming(a, b, strata, strata, noise, paired=True, draws=199).p_value <= 0.05
    low, high = limits(0.05, SETS)
    assert low <= rejected / SETS <= high


@pytest.mark.parametrize("paired", [True, False])
def test_error_rates_of_permutations(paired: bool) -> None:
    strata = np.repeat(np.arange(5), 4)
    found: dict[str, list[float]] = {name: [] for name in ("mmd", "mmd shifted", "energy", "energy shifted")}
    for seed in range(SETS):
        noise = rng(seed)
        prompt = noise.integers(0, 3, (5, 6))[strata]
        # tokens follow the prompt's text with probability 0.5; shifted: 0.9
        a, b, c = (np.where(noise.random((20, 6)) < q, prompt, noise.integers(3, 6, (20, 6))) for q in (0.5, 0.5, 0.9))
        x, y = noise.standard_normal(20), noise.standard_normal(20)
        for name, one, other in (("mmd", a, b), ("mmd shifted", a, c)):
            test = two_sample.mmd_hamming(one, other, strata, strata, noise, paired=paired, draws=199)
            found[name].append(test.p_value)
        for name, shift in (("energy", 0.0), ("energy shifted", 1.5)):
            found[name].append(two_sample.energy_distance(x, y + shift, noise, paired=paired, draws=199).p_value)
    rates = {name: float(np.mean(np.array(p_values) <= 0.05)) for name, p_values in found.items()}
    low, high = limits(0.05, SETS)
    assert low <= rates["mmd"] <= high and low <= rates["energy"] <= high, rates
    assert rates["mmd shifted"] > 0.9 and rates["energy shifted"] > 0.9, rates


def test_kaplan_meier_by_hand() -> None:
    events = np.array([True, True, False, True, False])
    found = survival.kaplan_meier(np.array([1, 2, 2, 3, 4]), events)
    # 4/5; then 3/4 of it; then 1/2 of that
    assert found["time"].tolist() == [1, 2, 3] and found["at_risk"].tolist() == [5, 4, 2]
    assert found["survival"].tolist() == pytest.approx([0.8, 0.6, 0.3])
    greenwood = [1 / 20, 1 / 20 + 1 / 12, 1 / 20 + 1 / 12 + 1 / 2]
    expected = [s * math.sqrt(v) for s, v in zip([0.8, 0.6, 0.3], greenwood, strict=True)]
    assert found["se"].tolist() == pytest.approx(expected)
    assert len(survival.kaplan_meier(np.array([3]), np.array([False]))) == 0
    with pytest.raises(ValueError, match="at least 1"):
        survival.kaplan_meier(np.array([0]), np.array([True]))


def test_log_rank_and_hazard_by_hand() -> None:
    yes = np.array([True, True])
    # E of a: 1/2 at 1, 2/3 at 2, 0 at 3, against 2; V = 1/4 + 2/9
    statistic, p_value = survival.log_rank(np.array([1, 2]), yes, np.array([2, 3]), yes)
    assert statistic == pytest.approx((5 / 6) ** 2 / (1 / 4 + 2 / 9))
    assert p_value == pytest.approx(stats.chi2.sf(statistic, 1))
    assert survival.log_rank(np.array([2, 3]), yes, np.array([1, 2]), yes) == pytest.approx((statistic, p_value))
    assert all(math.isnan(x) for x in survival.log_rank(np.array([2]), ~yes[:1], np.array([2]), ~yes[:1]))
    # one event in five tokens: exp(-m) = 0.975, and (1 + m) exp(-m) = 0.025 at m = 5.5716
    rate, low, high = survival.hazard(np.array([2, 3]), np.array([True, False]))
    assert (rate, low, high) == pytest.approx((0.2, -math.log(0.975) / 5, 5.5716434 / 5))
    assert survival.hazard(np.array([4]), np.array([False]))[:2] == (0.0, 0.0)


@SOME
@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=15))
def test_survival_against_scipy_and_definition(rows: list[tuple[int, bool]]) -> None:
    durations, events = np.array([d for d, _ in rows]), np.array([e for _, e in rows], bool)
    found = survival.kaplan_meier(durations, events)
    alive = 1.0
    for time in sorted({d for d, e in rows if e}):
        alive *= 1 - sum(d == time and e for d, e in rows) / sum(d >= time for d, _ in rows)
        assert found.set_index("time").loc[time, "survival"] == pytest.approx(alive)
    censored = stats.CensoredData(uncensored=durations[events], right=durations[~events])
    if events.any():
        scipys = stats.ecdf(censored).sf
        assert scipys.evaluate(found["time"]) == pytest.approx(found["survival"].to_numpy())


def test_log_rank_error_rates() -> None:
    def simulated(noise: np.random.Generator, rate: float) -> tuple[Ints, npt.NDArray[np.bool_]]:
        times = noise.geometric(rate, 60)
        return np.minimum(times, 20), times <= 20

    found = {0.1: 0, 0.25: 0}
    for seed in range(SETS):
        noise = rng(seed)
        base = simulated(noise, 0.1)
        for rate in found:
            found[rate] += survival.log_rank(*base, *simulated(noise, rate))[1] <= 0.05
    low, high = limits(0.05, SETS)
    assert low <= found[0.1] / SETS <= high and found[0.25] / SETS > 0.9
