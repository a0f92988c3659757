"""Sampling with bounds instead of logarithms takes the same tokens as the eager code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.distribution import distribution
from ppo_repro.numerics.kernels import gumbel
from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.rollout import sampler
from ppo_repro.rollout.engine import Sampling
from ppo_repro.rollout.sampler import gumbel_noise, murmur_hash32, sample
from tests.support.cases.gumbel import CUTS, samples
from tests.support.kernels import KINDS, Array, both, seeds, threads, using

MASK = 0xFFFFFFFF
EDGES = np.unique(np.clip([(2**k) + d for k in range(33) for d in range(-300, 301)], 0, MASK)).astype(np.uint32)


Case = tuple[int, int, int, str, tuple[int, float], float, bool]
cases = st.tuples(
    seeds,
    st.integers(1, 8),
    st.integers(1, 300),
    st.sampled_from(KINDS),
    st.sampled_from(CUTS),
    st.sampled_from([1.0, 0.7, 2.5, 100.0]),
    st.sampled_from([False, False, False, True]),
)


@settings(max_examples=200)
@given(cases, threads)
def test_kernels_sample_the_tokens_of_the_eager_code(case: Case, count: int) -> None:
    expected, got = both(lambda: samples(*case), count)
    assert expected == got


@pytest.mark.long
@pytest.mark.timeout(3000)
@settings(max_examples=4000)
@given(cases, threads)
def test_kernels_sample_the_tokens_of_the_eager_code_in_many_cases(case: Case, count: int) -> None:
    expected, got = both(lambda: samples(*case), count)
    assert expected == got


@pytest.mark.parametrize("vocab_size", [8192, 50257])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_sample_the_tokens_of_the_eager_code_from_large_vocabularies(vocab_size: int, kind: str) -> None:
    expected, got = both(lambda: samples(1, 8, vocab_size, kind, (0, 1.0), 0.7, False), 2)
    assert expected == got


@kernel
def noise_and_bounds(hashes, exact, bounds):  # type: ignore[no-untyped-def]
    for i in range(hashes.size):
        exact[i] = gumbel.noise_of_hash(hashes[i])
        bounds[i] = gumbel.bound_of_hash(hashes[i])


def computed(hashes: Array) -> tuple[Array, Array]:
    exact, bounds = np.empty(len(hashes)), np.empty(len(hashes), np.float32)
    noise_and_bounds(hashes, exact, bounds)
    return exact, bounds


def hashes() -> Array:
    """All hashes where something changes, and a million random ones."""
    return np.concatenate([EDGES, np.random.default_rng(0).integers(0, 2**32, 1_000_000, np.uint32)])


def test_the_noise_of_a_hash_is_that_of_the_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = hashes()
    monkeypatch.setattr(sampler, "murmur_hash32", lambda words: torch.from_numpy(drawn.astype(np.int64))[None])
    expected = gumbel_noise(torch.tensor([0]), torch.tensor([0]), len(drawn))[0].numpy()
    assert np.array_equal(computed(drawn)[0].view(np.int64), expected.view(np.int64))


def test_no_noise_exceeds_its_bound_by_more_than_the_slack_allows() -> None:
    exact, bounds = computed(hashes())
    # the slack also covers the roundings of log p and of the sum, 2^-24 of at most 722 each
    assert float((exact - bounds).max()) < float(gumbel.SLACK) / 4
    # for tokens that win, the bound is tight; a loose bound would hold too, but save nothing
    likely = (exact > 3.0) & (hashes() < MASK)
    assert float((bounds - exact)[likely].max()) < 0.1


@settings(max_examples=200)
@given(st.lists(st.integers(0, MASK), min_size=4, max_size=4))
def test_the_hash_is_that_of_the_eager_code(words: list[int]) -> None:
    state = np.uint32(0)
    for word in words:
        state = gumbel.absorb(state, word)
    expected = murmur_hash32([torch.tensor([w]) for w in words])
    assert int(gumbel.finish(state)) == int(expected)


def test_choosing_by_the_bound_alone_takes_other_tokens() -> None:
    # if the likeliest bound always won, the exact scores would never have been needed
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((500, 40), np.float32))
    keys, positions = torch.arange(500), torch.full((500,), 9)
    with using("float64"):
        tokens = sample(logits, keys, positions, Sampling(1.0, 0, 1.0, 1), "exact").tokens
    d = distribution(logits, None)
    words = [keys & MASK, keys >> 32, positions]
    drawn = murmur_hash32([*(w[:, None] for w in words), torch.arange(40)[None]]).numpy().astype(np.uint32)
    bounds = torch.from_numpy(computed(drawn.reshape(-1))[1].reshape(drawn.shape))
    by_bound = (d.shifted - d.log_total + bounds).argmax(-1)
    assert 20 < int((by_bound != tokens).sum()) < 400


def test_the_first_of_tokens_that_tie_is_taken() -> None:
    log_p = np.array([-50.0, 0.0, -1.0, 0.0], np.float32)
    # one column for all tokens makes their noise equal; by their bounds the last of the two looks best
    columns, bounds = np.zeros(4, np.int64), np.array([60.0, 100.0, 99.0, 101.0], np.float32)
    winner = kernel(gumbel.winner.py_func)
    assert winner(np.uint32(0), log_p, columns, bounds, np.float32(101.0)) == 1


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("cuts", [(0, 1.0), (3, 1.0), (0, 0.5)])
@pytest.mark.parametrize("greedy", [False, True])
def test_logits_that_are_not_finite_are_an_error(bad: float, cuts: tuple[int, float], greedy: bool) -> None:
    logits = torch.zeros(3, 20)
    logits[1, 17] = bad
    with using("float64"), pytest.raises(NumericsError, match="logits are not finite"):
        sample(logits, torch.arange(3), torch.arange(3), Sampling(1.0, *cuts, 1, greedy), "exact")
