"""Coefficients that move between iterations, and learning-rate schedules: by hand and by definition."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.buffers import ReturnStatistics
from ppo_repro.ppo.controllers import adaptive_clip_range, adaptive_kl_coef, adaptive_penalty_coef, rate_factor

KLS = (0.0, 0.0199, 0.0201, 0.0449, 0.0451)  # around 0.03 / 1.5 and 0.03 * 1.5


def test_the_rules_by_hand() -> None:
    # error +0.1 over 100 of 1000 responses: 2 (1 + 0.1 * 0.1); clipped to +-0.2
    found = [adaptive_kl_coef(2.0, kl, 6.0, 100, 1000) for kl in (6.6, 600.0, 0.0, 6.0)]
    assert found == pytest.approx([2.02, 2.04, 1.96, 2.0], rel=1e-12)
    assert adaptive_kl_coef(2.0, 0.0, 6.0, 10**6, 1) == pytest.approx(1.6), "not below 0"
    assert [adaptive_penalty_coef(1.0, kl, 0.03, 1.0) for kl in KLS] == [0.5, 0.5, 1, 1, 2]
    assert [adaptive_clip_range(0.2, kl, 0.03, 0.05, 0.5) for kl in KLS] == [0.4, 0.4, 0.2, 0.2, 0.1]


@given(st.lists(st.floats(0, 1), max_size=60), st.floats(1e-3, 1e3))
def test_clip_range_and_penalty_stay_in_their_bounds(kls: list[float], first: float) -> None:
    clip_range, penalty = 0.2, first
    for kl in (*kls, *[0.0] * 1200):  # more halvings than float64 has
        clip_range = adaptive_clip_range(clip_range, kl, 0.01, 0.02, 0.5)
        penalty = adaptive_penalty_coef(penalty, kl, 0.01, first)
        assert 0.02 <= clip_range <= 0.5
        assert first / 2**20 <= penalty <= first * 2**20
    for _ in range(1200):
        penalty = adaptive_penalty_coef(penalty, 1.0, 0.01, first)
    assert penalty == first * 2**20, "it comes back from its lower bound, and ends at the upper one"


returns = st.lists(st.integers(-1000, 1000).map(lambda n: n / 8), min_size=1, max_size=20)


@given(st.lists(returns, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_return_statistics_are_of_all_returns_together_in_any_order(parts: list[list[float]], random) -> None:
    found = shuffled = ReturnStatistics()
    assert (found.mean, found.scale) == (0.0, 1.0), "before there are any, values are in their own units"
    for part in parts:
        found, shuffled = found.joined(part), shuffled.joined(random.sample(part, len(part)))
    everything = [x for part in parts for x in part]
    # a few float64 roundings per update, of numbers up to 125
    assert found == shuffled
    assert found.count == len(everything)
    assert found.mean == pytest.approx(fmean(everything), abs=1e-11)
    assert found.scale == pytest.approx(max(pstdev(everything), 1e-4), rel=1e-9, abs=1e-9)


def test_schedules_by_hand() -> None:
    assert [rate_factor("linear", i, 4, 0) for i in range(4)] == [1.0, 0.75, 0.5, 0.25]
    root = math.sqrt(0.5)
    cosine = [rate_factor("cosine", i, 4, 0) for i in range(4)]
    assert cosine == pytest.approx([1.0, (1 + root) / 2, 0.5, (1 - root) / 2], abs=1e-15)
    assert [rate_factor("linear", i, 6, 2) for i in range(6)] == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25])
