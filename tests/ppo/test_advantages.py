"""GAE, group advantages, whitening, explained variance: by hand, by definition, and in any order."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_repro.ppo.advantages import explained_variance, gae, group_advantages, whiten
from tests.support.float32 import bits, finite, lists, tensor

Sequences = list[list[tuple[float, float]]]  # (reward, value) of each token of each response
numbers = finite(-100.0, 100.0)
sequences = st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=7), min_size=1, max_size=6)
# small integers: with factors that are powers of two float32 then makes no rounding error at all
whole = st.integers(-8, 8).map(float)
whole_sequences = st.lists(st.lists(st.tuples(whole, whole), min_size=1, max_size=6), min_size=1, max_size=5)


def run(batch: Sequences, gamma: float, gae_lambda: float, finals: list[float] | None = None) -> list[torch.Tensor]:
    """`gae` on a batch, one tensor per response."""
    rewards = tensor([r for sequence in batch for r, _ in sequence])
    values = tensor([v for sequence in batch for _, v in sequence])
    lengths = [len(sequence) for sequence in batch]
    final_values = tensor(finals or [0.0] * len(lengths))
    return list(torch.split(gae(rewards, values, torch.tensor(lengths), final_values, gamma, gae_lambda), lengths))


def definition(sequence: list[tuple[float, float]], final: float, gamma: float, gae_lambda: float) -> list[Fraction]:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, in rationals."""
    r, v = [Fraction(x) for x, _ in sequence], [*(Fraction(x) for _, x in sequence), Fraction(final)]
    delta = [r[t] + Fraction(gamma) * v[t + 1] - v[t] for t in range(len(r))]
    decay = Fraction(gamma) * Fraction(gae_lambda)
    return [sum((decay**step * delta[t + step] for step in range(len(r) - t)), Fraction(0)) for t in range(len(r))]


factor = st.sampled_from([0.0, 0.5, 1.0])


@given(whole_sequences, st.lists(whole, min_size=5, max_size=5), factor, factor)
def test_gae_is_its_definition(batch: Sequences, finals: list[float], gamma: float, lam: float) -> None:
    """TD(0), the Monte Carlo return minus the value, and bootstrapping are its cases."""
    for sequence, final, found in zip(batch, finals, run(batch, gamma, lam, finals[: len(batch)]), strict=False):
        assert [Fraction(x) for x in found.tolist()] == definition(sequence, final, gamma, lam)


@given(sequences, st.floats(0, 1), st.floats(0, 1), st.randoms(use_true_random=False))
def test_a_response_does_not_see_the_batch_it_is_in(batch: Sequences, gamma: float, lam: float, random) -> None:
    together = run(batch, gamma, lam)
    order = random.sample(range(len(batch)), len(batch))
    shuffled = run([batch[i] for i in order], gamma, lam)
    for position, i in enumerate(order):
        alone = bits(run([batch[i]], gamma, lam)[0])
        assert bits(together[i]) == alone
        assert bits(shuffled[position]) == alone


def test_group_advantages_by_hand() -> None:
    scores, groups = [1.0, 0.0, 5.0, 1.0, 0.0], ["a", "a", "b", "a", "a"]
    # group a: mean 1/2, deviation 1/2; b is alone
    assert group_advantages(scores, groups, scale=False) == [0.5, -0.5, 0.0, 0.5, -0.5]
    scaled = 0.5 / (0.5 + 1e-6)
    assert group_advantages(scores, groups, scale=True) == [scaled, -scaled, 0.0, scaled, -scaled]


@given(st.lists(st.tuples(st.integers(-9, 9), st.sampled_from("abc")), min_size=1, max_size=12), st.booleans())
def test_group_advantages_sum_to_zero_and_see_no_order(rows: list[tuple[int, str]], scale: bool) -> None:
    scores, groups = [float(s) for s, _ in rows], [g for _, g in rows]
    found = group_advantages(scores, groups, scale)
    for group in set(groups):
        total = math.fsum(a for a, g in zip(found, groups, strict=True) if g == group)
        # float64: each is rounded once, of at most 10 in size
        assert abs(total) < 1e-13 / (1e-6 if scale else 1)
    assert group_advantages(scores[::-1], groups[::-1], scale) == found[::-1]


@settings(max_examples=2000)
@given(st.floats(-1e300, 1e300), st.integers(1, 64), st.booleans())
def test_a_group_of_equal_scores_moves_nothing(score: float, count: int, scale: bool) -> None:
    assert group_advantages([score] * count, ["a"] * count, scale) == [0.0] * count


@settings(max_examples=500)
@given(finite(), st.integers(1, 3000))
def test_a_batch_of_equal_values_moves_nothing(value: float, count: int) -> None:
    assert whiten(tensor([value] * count)).tolist() == [0.0] * count
    assert bits(whiten(tensor([value] * count), shift=False)) == bits(tensor([value + 0.0] * count))


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=30), st.sampled_from([1, 2**20]))
def test_whitening_is_its_definition(whole_numbers: list[int], parts: int) -> None:
    numbers, n = [Fraction(number, parts) for number in whole_numbers], len(whole_numbers)
    mean = sum(numbers, Fraction(0)) / n
    variance = sum(((x - mean) ** 2 for x in numbers), Fraction(0)) / n
    expected = [float(x - mean) / math.sqrt(float(variance) + 1e-8) for x in numbers]
    x = tensor([float(number) for number in numbers])
    # one float32 rounding (2^-24); the float64 mean is off by 1e-13, times at most 1e4 for variance 0
    assert whiten(x).tolist() == pytest.approx(expected, rel=2.0**-23, abs=1e-9)
    shifted = [value + float(mean) for value in expected]
    assert whiten(x, shift=False).tolist() == pytest.approx(shifted, rel=2.0**-22, abs=1e-9)


@given(lists(-1e6, 1e6), st.randoms(use_true_random=False))
def test_whitening_does_not_see_the_order(values: list[float], random) -> None:
    order = random.sample(range(len(values)), len(values))
    assert bits(whiten(tensor(values))[order]) == bits(whiten(tensor([values[i] for i in order])))


def test_explained_variance_by_hand() -> None:
    # errors (0, 0, 0, 1): variance 3/16; returns: variance 5/4; 1 - 3/20
    returns = tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(tensor([1.0, 2.0, 3.0, 3.0]), returns) == pytest.approx(0.85, abs=1e-15)
    assert explained_variance(-returns, returns) == -3.0  # errors twice the returns: four times the variance
    assert explained_variance(returns + 8.0, returns) == 1.0, "a constant offset is not variance"
    assert explained_variance(returns, tensor([2.5] * 4)) is None
