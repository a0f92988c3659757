"""Rewards per token, GAE, whitening, explained variance: by hand, by definition, and in any order."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.ppo.advantages import explained_variance, gae, group_advantages, whiten
from ppo_repro.ppo.rewards import place_scores, token_rewards
from tests.support.float32 import bits, finite, lists, tensor

Sequences = list[list[tuple[float, float]]]  # (reward, value) of each token of each response
numbers = finite(-100.0, 100.0)
sequences = st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=7), min_size=1, max_size=6)
# small integers: with factors that are powers of two float32 then makes no rounding error at all
whole = st.integers(-8, 8).map(float)
whole_sequences = st.lists(st.lists(st.tuples(whole, whole), min_size=1, max_size=6), min_size=1, max_size=5)


def run(batch: Sequences, gamma: float, gae_lambda: float) -> list[torch.Tensor]:
    """`gae` on a batch, one tensor per response."""
    rewards = tensor([r for sequence in batch for r, _ in sequence])
    values = tensor([v for sequence in batch for _, v in sequence])
    lengths = [len(sequence) for sequence in batch]
    found = gae(rewards, values, torch.tensor(lengths), torch.zeros(len(lengths)), gamma, gae_lambda)
    assert found.dtype == torch.float32
    return list(torch.split(found, lengths))


def definition(sequence: list[tuple[float, float]], gamma: float, gae_lambda: float) -> list[Fraction]:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, in rationals."""
    r, v = [Fraction(x) for x, _ in sequence], [Fraction(x) for _, x in sequence] + [Fraction(0)]
    delta = [r[t] + Fraction(gamma) * v[t + 1] - v[t] for t in range(len(r))]
    decay = Fraction(gamma) * Fraction(gae_lambda)
    return [sum((decay**step * delta[t + step] for step in range(len(r) - t)), Fraction(0)) for t in range(len(r))]


def test_three_tokens_by_hand() -> None:
    # gamma = lambda = 1/2. delta = (0 + 2/2 - 1, 1 + 4/2 - 2, 8 - 4) = (0, 1, 4)
    # A_2 = 4, A_1 = 1 + 4/4 = 2, A_0 = 0 + 2/4 = 0.5
    assert run([[(0.0, 1.0), (1.0, 2.0), (8.0, 4.0)]], 0.5, 0.5)[0].tolist() == [0.5, 2.0, 4.0]


@given(whole_sequences, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_gae_is_its_definition_exactly_where_float32_is_exact(batch: Sequences, gamma: float, lam: float) -> None:
    for sequence, found in zip(batch, run(batch, gamma, lam), strict=True):
        assert [Fraction(x) for x in found.tolist()] == definition(sequence, gamma, lam)


@given(sequences, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_its_definition_up_to_float32_rounding(batch: Sequences, gamma: float, lam: float) -> None:
    for sequence, found in zip(batch, run(batch, gamma, lam), strict=True):
        length = len(sequence)
        magnitude = math.fsum(abs(r) + 2 * abs(v) for r, v in sequence)
        # a term passes at most 4 roundings per step, each 2^-24 of it; tiny products may also underflow
        tolerance = 4 * (length + 1) * 2.0**-24 * magnitude + 1e-40
        for x, exact in zip(found.tolist(), definition(sequence, gamma, lam), strict=True):
            assert abs(x - float(exact)) <= tolerance


@given(sequences, st.floats(0, 1, width=32))
def test_lambda_zero_is_the_one_step_error(batch: Sequences, gamma: float) -> None:
    for sequence, found in zip(batch, run(batch, gamma, 0.0), strict=True):
        r, v = tensor([x for x, _ in sequence]), tensor([x for _, x in sequence])
        following = torch.cat([v[1:], torch.zeros(1)])
        assert torch.equal(found, (r + following * gamma) - v)


@given(whole_sequences)
def test_lambda_one_is_the_return_minus_the_value(batch: Sequences) -> None:
    for sequence, found in zip(batch, run(batch, 1.0, 1.0), strict=True):
        returns = [sum(r for r, _ in sequence[t:]) for t in range(len(sequence))]
        assert found.tolist() == [g - v for g, (_, v) in zip(returns, sequence, strict=True)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.5, 0.5)])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_a_final_reward_decays_by_gamma_lambda_per_token(gamma: float, lam: float, length: int) -> None:
    found = run([[(0.0, 0.0)] * (length - 1) + [(1.0, 0.0)]], gamma, lam)[0].tolist()
    for t, x in enumerate(found):
        # one product per step: the factor and the product are each rounded by 2^-24
        steps = length - 1 - t
        assert x == pytest.approx((gamma * lam) ** steps, rel=(2 * steps + 1) * 2.0**-24)


@given(sequences, st.floats(0, 1), st.floats(0, 1))
def test_nothing_follows_the_last_token(batch: Sequences, gamma: float, lam: float) -> None:
    for sequence, found in zip(batch, run(batch, gamma, lam), strict=True):
        reward, value = sequence[-1]
        assert found[-1].item() == (tensor([reward]) - tensor([value])).item()


@given(sequences, st.floats(0, 1), st.floats(0, 1), st.randoms(use_true_random=False))
def test_a_response_does_not_see_the_batch_it_is_in(batch: Sequences, gamma: float, lam: float, random) -> None:
    together = run(batch, gamma, lam)
    order = random.sample(range(len(batch)), len(batch))
    shuffled = run([batch[i] for i in order], gamma, lam)
    for place, i in enumerate(order):
        alone = bits(run([batch[i]], gamma, lam)[0])
        assert bits(together[i]) == alone and bits(shuffled[place]) == alone


def test_whitening_by_hand() -> None:
    # mean 2, variance 1; mean 2, variance 4. The 1e-8 moves the result by 5e-9, less than half a float32 step
    assert whiten(tensor([1.0, 3.0])).tolist() == [-1.0, 1.0]
    assert whiten(tensor([0.0, 4.0, 4.0, 0.0])).tolist() == [-1.0, 1.0, 1.0, -1.0]
    # variance 1e-8: the offset halves it. 2e-4 is off by 2^-25 relative in float32
    assert whiten(tensor([0.0, 2e-4])).tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-6)


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=30))
def test_whitening_is_its_definition(whole_numbers: list[int]) -> None:
    n = len(whole_numbers)
    mean = Fraction(sum(whole_numbers), n)
    variance = sum(((x - mean) ** 2 for x in whole_numbers), Fraction(0)) / n
    expected = [float(x - mean) / math.sqrt(float(variance) + 1e-8) for x in whole_numbers]
    # one float32 rounding (2^-24); the float64 mean is off by 1e-13, times at most 1e4 for variance 0
    found = whiten(tensor([float(x) for x in whole_numbers]))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=2.0**-23, abs=1e-9)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e6])
def test_whitened_values_have_mean_zero_and_variance_one(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = whiten(torch.randn(5000, generator=generator) * scale + 3 * scale).to(torch.float64)
    # every value is rounded by 2^-24 relative; 1e-8 joins the variance, whose sample value may be 10% off scale^2
    assert abs(x.mean().item()) < 2.0**-24
    assert x.var(unbiased=False).item() == pytest.approx(1.0, abs=2.0**-22 + 1.1e-8 / scale**2)


@given(lists(-1e6, 1e6), st.randoms(use_true_random=False))
def test_whitening_does_not_see_the_order(values: list[float], random) -> None:
    order = random.sample(range(len(values)), len(values))
    assert bits(whiten(tensor(values))[order]) == bits(whiten(tensor([values[i] for i in order])))


def test_the_usual_whitening_does_see_the_order() -> None:
    def usual(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean()) / (x.std() + 1e-8)

    generator = torch.Generator().manual_seed(0)
    seen = 0
    for _ in range(20):
        x = torch.randn(999, generator=generator)
        order = torch.randperm(999, generator=generator)
        seen += bits(usual(x)[order]) != bits(usual(x[order]))
        assert bits(whiten(x)[order]) == bits(whiten(x[order]))
    assert seen > 0


@given(finite(-1e30, 1e30), st.integers(1, 50))
def test_equal_values_whiten_to_zero(value: float, count: int) -> None:
    assert whiten(tensor([value] * count)).tolist() == [0.0] * count


def test_explained_variance_by_hand() -> None:
    # errors (0, 0, 0, 1): variance 3/16; returns: variance 5/4; 1 - 3/20
    returns = tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(tensor([1.0, 2.0, 3.0, 3.0]), returns) == pytest.approx(0.85, abs=1e-15)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(tensor([2.5] * 4), returns) == 0.0
    assert explained_variance(-returns, returns) == -3.0  # errors twice the returns: four times the variance
    assert explained_variance(returns + 8.0, returns) == 1.0, "a constant offset is not variance"


@given(finite(-1e30, 1e30), lists())
def test_returns_that_do_not_vary_have_no_explained_variance(value: float, predictions: list[float]) -> None:
    assert explained_variance(tensor(predictions), tensor([value] * len(predictions))) is None


def scored_at_the_end(scores: torch.Tensor, penalties: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    words = torch.zeros(len(penalties), dtype=torch.int64)
    return token_rewards(place_scores(scores, lengths, words, "last"), penalties)


def test_token_rewards_by_hand() -> None:
    penalties = tensor([0.5, 0.25, 0.125])
    found = scored_at_the_end(torch.tensor([2.0, -1.0], dtype=torch.float64), penalties, torch.tensor([2, 1]))
    assert found.tolist() == [-0.5, 1.75, -1.125] and found.dtype == torch.float32
    assert penalties.tolist() == [0.5, 0.25, 0.125], "the penalties are recorded and must not change"


@given(st.lists(st.tuples(st.floats(-100, 100), lists(-10.0, 10.0, size=8)), min_size=1, max_size=6))
def test_rewards_conserve_score_minus_penalties_and_only_the_last_token_is_scored(
    responses: list[tuple[float, list[float]]],
) -> None:
    lengths = [len(penalties) for _, penalties in responses]
    penalties = tensor([x for _, row in responses for x in row])
    scores = torch.tensor([s for s, _ in responses], dtype=torch.float64)
    found = torch.split(scored_at_the_end(scores, penalties, torch.tensor(lengths)), lengths)
    for rewards, (score, row) in zip(found, responses, strict=True):
        assert bits(rewards[:-1]) == bits(0.0 - tensor(row[:-1]))
        # the score and the last sum are each rounded to float32 once; scores may be too small for float32
        tolerance = 2.0**-24 * (2 * abs(score) + abs(row[-1])) + 2.0**-149
        assert abs(math.fsum(rewards.tolist()) - (score - math.fsum(row))) <= tolerance * 1.001 + 1e-13


def test_a_cut_response_is_bootstrapped_by_hand() -> None:
    # gamma = lambda = 1/2, rewards 0 and 1, values 1 and 2, then 4 where it was cut
    # delta = (0 + 2/2 - 1, 1 + 4/2 - 2) = (0, 1); A_1 = 1, A_0 = 0 + 1/4
    found = gae(tensor([0.0, 1.0]), tensor([1.0, 2.0]), torch.tensor([2]), tensor([4.0]), 0.5, 0.5)
    assert found.tolist() == [0.25, 1.0]
    ended = gae(tensor([0.0, 1.0]), tensor([1.0, 2.0]), torch.tensor([2]), tensor([0.0]), 0.5, 0.5)
    assert ended.tolist() == [-0.25, -1.0], "calling a cut an end makes the last token look bad"


@given(whole_sequences, st.lists(whole, min_size=5, max_size=5), st.sampled_from([0.5, 1.0]))
def test_a_final_value_is_a_reward_of_gamma_times_it(batch: Sequences, finals: list[float], gamma: float) -> None:
    lengths = torch.tensor([len(sequence) for sequence in batch])
    rewards = tensor([r for sequence in batch for r, _ in sequence])
    values = tensor([v for sequence in batch for _, v in sequence])
    final = tensor(finals[: len(batch)])
    found = gae(rewards, values, lengths, final, gamma, 0.5)
    paid = rewards.clone()
    paid[torch.cumsum(lengths, 0) - 1] += final * gamma
    assert torch.equal(found, gae(paid, values, lengths, torch.zeros(len(batch)), gamma, 0.5))


def test_group_advantages_by_hand() -> None:
    scores, groups = [1.0, 0.0, 5.0, 1.0, 0.0], ["a", "a", "b", "a", "a"]
    # group a: mean 1/2, deviation 1/2; b is alone
    assert group_advantages(scores, groups, scale=False) == [0.5, -0.5, 0.0, 0.5, -0.5]
    scaled = 0.5 / (0.5 + 1e-6)
    assert group_advantages(scores, groups, scale=True) == [scaled, -scaled, 0.0, scaled, -scaled]
    assert group_advantages([3.0, 3.0], ["a", "a"], scale=True) == [0.0, 0.0], "nothing to prefer, nothing learnt"


@given(st.lists(st.tuples(st.integers(-9, 9), st.sampled_from("abc")), min_size=1, max_size=12), st.booleans())
def test_group_advantages_sum_to_zero_and_see_no_order(rows: list[tuple[int, str]], scale: bool) -> None:
    scores, groups = [float(s) for s, _ in rows], [g for _, g in rows]
    found = group_advantages(scores, groups, scale)
    for group in set(groups):
        # float64: each is rounded once, of at most 10 in size
        assert abs(math.fsum(a for a, g in zip(found, groups, strict=True) if g == group)) < 1e-13 / (
            1e-6 if scale else 1
        )
    assert group_advantages(scores[::-1], groups[::-1], scale) == found[::-1]


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=30))
def test_scaling_without_shift_keeps_the_mean(numbers: list[int]) -> None:
    x = tensor([float(n) for n in numbers])
    scaled, whitened = whiten(x, shift=False).to(torch.float64), whiten(x).to(torch.float64)
    mean = math.fsum(numbers) / len(numbers)
    # two float32 roundings of numbers of that size
    assert (scaled - whitened).tolist() == pytest.approx([mean] * len(numbers), abs=2.0**-22 * (abs(mean) + 6))


def test_normalising_rewards_to_mean_zero_changes_what_length_is_worth() -> None:
    """Why reward whitening keeps the mean: shifted, every further token of a good response costs or pays something."""
    rewards = tensor([0.0, 0.0, 0.0, 4.0])
    assert whiten(rewards, shift=False)[0].item() != 0 or whiten(rewards)[0].item() < 0
    assert whiten(rewards)[:3].tolist() == [whiten(rewards)[0].item()] * 3 and whiten(rewards)[0].item() < 0
