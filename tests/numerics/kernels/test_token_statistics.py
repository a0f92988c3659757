"""Fused token statistics equal the eager code bit for bit, and are as accurate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.logprobs import Scores, score, token_statistics
from tests.support.cases.token_statistics import MASKS, TEMPERATURES, masked, statistics
from tests.support.in_order import sum_in_order
from tests.support.kernels import KINDS, both, outcome, seeds, threads, using, values
from tests.support.models import unequal

cases = st.tuples(
    seeds,
    st.integers(1, 5),
    st.integers(1, 300),
    st.sampled_from(KINDS),
    st.sampled_from(MASKS),
    st.sampled_from(TEMPERATURES),
    st.booleans(),
)
Case = tuple[int, int, int, str, str, float, bool]


@settings(max_examples=200)
@given(cases, threads)
def test_kernels_equal_the_eager_code(case: Case, count: int) -> None:
    expected, got = both(lambda: statistics(*case), count)
    assert expected == got


@pytest.mark.long
@pytest.mark.timeout(3000)
@settings(max_examples=4000)
@given(cases, threads)
def test_kernels_equal_the_eager_code_in_many_cases(case: Case, count: int) -> None:
    expected, got = both(lambda: statistics(*case), count)
    assert expected == got


@pytest.mark.parametrize("vocab_size", [8192, 50257])
@pytest.mark.parametrize("mask", ["all", "some"])
@pytest.mark.parametrize("kind", ["normal", "far", "ties"])
def test_kernels_equal_the_eager_code_over_large_vocabularies(vocab_size: int, mask: str, kind: str) -> None:
    expected, got = both(lambda: statistics(0, 2, vocab_size, kind, mask, 0.7), 2)
    assert expected == got and expected != "refused"


def test_most_cases_are_computed_and_the_rest_refused() -> None:
    # the comparison above would hold if both sides refused everything
    def refused(temperature: float) -> set[str]:
        def one(seed: int, kind: str) -> bool:
            return outcome(lambda: statistics(seed, 2, 50, kind, "some", temperature)) == "refused"

        return {kind for kind in KINDS if any(one(seed, kind) for seed in range(10))}

    assert refused(1.0) == set()
    assert refused(1e-3) == {"low", "any"}


def test_sums_that_are_rounded_term_by_term_differ() -> None:
    """The negative control."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((200, 300), np.float32) * 3)
    targets = torch.from_numpy(rng.integers(0, 300, 200))
    with using("float64"):
        exact = token_statistics(logits, targets, 0.7, None, "exact")
    shifted = (logits - logits.amax(1, keepdim=True)) / 0.7
    weights = torch.exp(shifted.double()).float()
    total = sum_in_order(weights, 1)
    logprobs = shifted.gather(1, targets[:, None])[:, 0] - torch.log(total)
    entropies = torch.log(total) - sum_in_order(weights * shifted, 1) / total
    assert all(unequal(a, b) > 10 for a, b in zip(exact, (logprobs, entropies), strict=True))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(exact, (logprobs, entropies), strict=True))


@settings(max_examples=100)
@given(seeds, st.integers(1, 300), st.sampled_from(["normal", "ties", "sorted"]), st.sampled_from(MASKS))
def test_kernels_are_as_accurate_as_float64(seed: int, v: int, kind: str, mask: str) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(values(kind, (4, v), rng)).clamp(-30.0, 30.0)
    other = (logits + torch.from_numpy(values("ties", (4, v), rng))).clamp(-30.0, 30.0)
    targets = torch.from_numpy(rng.integers(0, v, 4))
    eligible = masked(mask, targets, v, rng)
    with using("float64"):
        scores = score(logits, other, targets, 0.7, eligible, "exact")
    log_p, log_q = (
        (x if eligible is None else x.masked_fill(~eligible, -torch.inf)).log_softmax(-1)
        for x in ((logits / 0.7).double(), (other / 0.7).double())
    )
    p = log_p.exp()
    expected = Scores(
        log_p.gather(-1, targets[:, None])[:, 0],
        -torch.where(p > 0, p * log_p, 0.0).sum(-1),
        p.square().sum(-1),
        log_q.gather(-1, targets[:, None])[:, 0],
        torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1),
    )
    for name, value in vars(scores).items():
        # float32 results of up to 100; exp right to 1e-7
        assert torch.allclose(value.double(), vars(expected)[name], rtol=5e-6, atol=2e-6), name


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("column", [0, 2, 299])
@pytest.mark.parametrize("mask", ["all", "some"])
def test_logits_that_are_not_finite_are_an_error(bad: float, column: int, mask: str) -> None:
    logits, targets = torch.zeros(3, 300), torch.zeros(3, dtype=torch.int64)
    eligible = masked(mask, targets, 300, np.random.default_rng(0))
    worse = logits.clone()
    worse[1, column] = bad
    for name in ("eager", "float64"):
        with using(name):
            with pytest.raises(NumericsError, match="logits are not finite"):
                token_statistics(worse, targets, 1.0, eligible, "exact")
            for pair in ((worse, logits), (logits, worse)):
                with pytest.raises(NumericsError, match="logits are not finite"):
                    score(*pair, targets, 1.0, eligible, "exact")


@pytest.mark.parametrize("name", ["eager", "float64"])
def test_distances_beyond_float32_and_rows_without_a_token_are_errors(name: str) -> None:
    targets = torch.zeros(1, dtype=torch.int64)
    none = torch.zeros(1, 2, dtype=torch.bool)
    with using(name):
        for logits, temperature, eligible in (
            (torch.tensor([[3e38, -3e38]]), 1.0, None),
            (torch.tensor([[3e38, 2e38]]), 0.1, None),
            (torch.zeros(1, 2), 1.0, none),
        ):
            with pytest.raises(NumericsError, match="logits are not finite"):
                token_statistics(logits, targets, temperature, eligible, "exact")


@pytest.mark.parametrize("target", [-1, 5])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    logits, targets = torch.zeros(2, 5), torch.tensor([0, target])
    with using("float64"):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            token_statistics(logits, targets, 1.0, None, "exact")
        with pytest.raises(IndexError, match="outside the vocabulary"):
            score(logits, logits, targets, 1.0, None, "exact")


def test_no_rows_give_no_statistics() -> None:
    expected, got = both(
        lambda: list(token_statistics(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 1.0, None, "exact"))
    )
    assert expected == got == [b"", b""]
