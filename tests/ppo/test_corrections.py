"""Importance weights, masks and rejection: by hand, beside NumPy in float64, and without effect if all agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.base.errors import NumericsError
from ppo_repro.ppo.corrections import (
    Correction,
    beyond_divergence,
    importance_ratios,
    masked_weights,
    normalized_weights,
    outside_ratio,
    removes_loss,
    truncated_weights,
    vetoed,
)
from tests.support.float32 import bits, finite, tensor

LEVELS = ("token", "sequence", "geometric")
LEVELS_OF_KL = ("token", "sum", "mean", "max")
logprobs = finite(-4.0, 0.0)
Rows = list[list[tuple[float, float]]]  # (old, rollout) of each token
responses = st.lists(st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=5), min_size=1, max_size=5)


def tensors(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    flat = [pair for row in rows for pair in row]
    return tensor([a for a, _ in flat]), tensor([b for _, b in flat]), torch.tensor([len(row) for row in rows])


def deltas(rows: Rows) -> list[np.ndarray]:
    """old - rollout of each response, rounded as float32 subtraction rounds."""
    return [np.array([np.float32(a) - np.float32(b) for a, b in row], dtype=np.float64) for row in rows]


def away_from(values: np.ndarray, *bounds: float) -> np.ndarray:
    """Where float32 and float64 cannot be on two sides of a bound."""
    return np.all([np.abs(values / bound - 1.0) > 1e-5 for bound in bounds], axis=0)


@given(responses, st.sampled_from(LEVELS), st.sampled_from([(0.5, 2.0), (0.0, 1.5), (0.9, 10.0)]))
def test_weights_are_numpys(rows: Rows, level: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    of = {"token": lambda d: d, "sequence": lambda d: d.sum() + 0 * d, "geometric": lambda d: d.mean() + 0 * d}[level]
    ratios, expected = importance_ratios(*tensors(rows), level), np.exp(np.concatenate([of(d) for d in deltas(rows)]))
    # the exponential's 1e-7, and one rounding of a sum of up to 20 nats
    np.testing.assert_allclose(ratios.numpy(), expected, rtol=2e-6)
    bounded = np.clip(expected, low, high)
    np.testing.assert_allclose(truncated_weights(ratios, low, high)[0], bounded, rtol=2e-6)
    sure, inside = away_from(expected, high, low or 1e-30), (expected >= low) & (expected <= high)
    weights, changes = masked_weights(ratios, low, high)
    assert removes_loss(changes).tolist() == (weights == 0.0).tolist()
    masked = weights.numpy()
    np.testing.assert_allclose(masked[sure], np.where(inside, expected, 0.0)[sure], rtol=2e-6)
    assert (outside_ratio(ratios, low, high).numpy() == ~inside)[sure].all()
    normal = normalized_weights(truncated_weights(ratios, low, high)[0], tensors(rows)[2], by_response=False)
    np.testing.assert_allclose(normal, bounded / bounded.mean(), rtol=4e-6)


@given(responses, st.sampled_from([1e-4, 0.3, 0.9]), st.sampled_from(LEVELS[1:]), st.randoms(use_true_random=False))
def test_a_response_sees_neither_its_neighbours_nor_the_order_of_its_tokens(
    rows: Rows, below: float, level: str, random
) -> None:
    ratios = importance_ratios(*tensors(rows), "token")
    runs = ratios.split([len(row) for row in rows])
    assert vetoed(ratios, tensors(rows)[2], below).tolist() == [
        bool((run < np.float32(below)).any()) for run in runs for _ in run
    ]
    together = importance_ratios(*tensors(rows), level)
    alone = torch.cat([importance_ratios(*tensors([row]), level) for row in rows])
    shuffled = [random.sample(row, len(row)) for row in rows]
    assert bits(together) == bits(alone) == bits(importance_ratios(*tensors(shuffled), level))


@given(st.lists(st.lists(logprobs, min_size=1, max_size=5), min_size=1, max_size=4), st.sampled_from(LEVELS))
def test_nothing_is_changed_where_sampler_and_trainer_agree(rows: list[list[float]], level: str) -> None:
    same = tensors([[(x, x) for x in row] for row in rows])
    ratios = importance_ratios(*same, level)
    one = bits(torch.ones(len(ratios)))
    assert bits(ratios) == one
    for function in (truncated_weights, masked_weights):
        weights, changes = function(ratios, 1.0, 1.0)
        assert bits(weights) == one
        assert (changes == Correction.NONE).all()
    assert all(bits(normalized_weights(ratios, same[2], by_response)) == one for by_response in (False, True))
    assert not outside_ratio(ratios, 1.0, 1.0).any()
    assert not vetoed(ratios, same[2], 1.0).any()
    for estimator in ("k2", "k3"):
        assert not any(beyond_divergence(*same, estimator, at, 1e-12).any() for at in LEVELS_OF_KL)


@pytest.mark.parametrize(("old", "sampled"), [(math.nan, -1.0), (-1.0, math.nan), (-math.inf, -math.inf)])
def test_a_ratio_that_is_no_number_is_refused_by_its_token(old: float, sampled: float) -> None:
    rows = [[(-1.0, -1.0)], [(old, sampled), (-1.0, -1.0)]]
    for level in LEVELS:
        with pytest.raises(NumericsError, match=r"old_logprobs - rollout_logprobs of token 1 is not a number \(1 of 3"):
            importance_ratios(*tensors(rows), level)
    with pytest.raises(NumericsError, match="token 1"):
        beyond_divergence(*tensors(rows), "k3", "token", 1.0)
