"""Importance weights and rejection: by hand, beside NumPy in float64, and their properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.ppo.corrections import (
    Correction,
    beyond_divergence,
    correction_names,
    importance_ratios,
    masked_weights,
    normalized_weights,
    outside_ratio,
    truncated_weights,
    vetoed,
)
from ppo_repro.records.schema import UPDATES
from tests.support.float32 import bits, finite, tensor

LEVELS = ("token", "sequence", "geometric")
LEVELS_OF_KL = ("token", "sum", "mean", "max")
logprobs = finite(-4.0, 0.0)
responses = st.lists(
    st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=5), min_size=1, max_size=5
)  # (old, rollout) of each token
Rows = list[list[tuple[float, float]]]


def tensors(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    flat = [pair for row in rows for pair in row]
    return tensor([a for a, _ in flat]), tensor([b for _, b in flat]), torch.tensor([len(row) for row in rows])


def deltas(rows: Rows) -> list[np.ndarray]:
    """old - rollout of each response, rounded as float32 subtraction rounds."""
    return [np.array([np.float32(a) - np.float32(b) for a, b in row], dtype=np.float64) for row in rows]


def ratios_in_float64(rows: Rows, level: str) -> np.ndarray:
    of = {"token": lambda d: d, "sequence": lambda d: d.sum() + 0 * d, "geometric": lambda d: d.mean() + 0 * d}[level]
    return np.exp(np.concatenate([of(d) for d in deltas(rows)]))


def away_from(values: np.ndarray, *bounds: float) -> np.ndarray:
    """Where float32 and float64 cannot be on two sides of a bound."""
    return np.all([np.abs(values / bound - 1.0) > 1e-5 for bound in bounds], axis=0)


def test_ratios_and_weights_by_hand() -> None:
    two, half = math.log(2.0), math.log(0.5)
    rows = [[(0.0, 0.0), (0.0, -two)], [(half, 0.0), (0.0, -3 * two)]]
    token = importance_ratios(*tensors(rows), "token")
    assert token.tolist() == pytest.approx([1.0, 2.0, 0.5, 8.0], rel=1e-6)
    assert importance_ratios(*tensors(rows), "sequence").tolist() == pytest.approx([2, 2, 4, 4], rel=1e-6)
    root = math.sqrt(2.0)
    assert importance_ratios(*tensors(rows), "geometric").tolist() == pytest.approx([root, root, 2, 2], rel=1e-6)
    weights, changes = truncated_weights(token, 0.0, 4.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, 0.5, 4.0], rel=1e-6)
    assert correction_names(changes) == ["none", "none", "none", "truncated_high"]
    weights, changes = truncated_weights(token, 0.75, 4.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, 0.75, 4.0], rel=1e-6)
    assert correction_names(changes)[2] == "truncated_low"
    weights, changes = masked_weights(token, 0.75, 4.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, 0.0, 0.0], rel=1e-6)
    assert correction_names(changes) == ["none", "none", "masked_low", "masked_high"]
    assert outside_ratio(token, 0.5 - 1e-6, 4.0).tolist() == [False, False, False, True]
    assert vetoed(token, torch.tensor([2, 2]), 0.6).tolist() == [False, False, True, True]
    # k2 of the log-ratios 0, ln 2, -ln 2, 3 ln 2
    k2 = [0.0, two**2 / 2, two**2 / 2, 9 * two**2 / 2]
    for level, values in {
        "token": k2,
        "sum": [k2[1]] * 2 + [k2[2] + k2[3]] * 2,
        "max": [k2[1]] * 2 + [k2[3]] * 2,
    }.items():
        found = [beyond_divergence(*tensors(rows), "k2", level, above) for above in (0.99 * k2[1], 1.01 * k2[1])]
        assert found[0].tolist() == [v > 0.99 * k2[1] for v in values]
        assert found[1].tolist() == [v > 1.01 * k2[1] for v in values]


def test_normalized_weights_by_hand() -> None:
    weights, lengths = tensor([2.0, 2.0, 2.0, 6.0]), torch.tensor([3, 1])
    assert normalized_weights(weights, lengths, by_response=False).tolist() == pytest.approx([2 / 3] * 3 + [2.0])
    assert normalized_weights(weights, lengths, by_response=True).tolist() == [0.5, 0.5, 0.5, 1.5]
    nothing = torch.zeros(4)
    assert bits(normalized_weights(nothing, lengths, by_response=False)) == bits(nothing)


@given(responses, st.sampled_from(LEVELS), st.sampled_from([(0.5, 2.0), (0.0, 1.5), (0.9, 10.0)]))
def test_weights_are_those_of_numpy(rows: Rows, level: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    ratios, expected = importance_ratios(*tensors(rows), level), ratios_in_float64(rows, level)
    # the exponential's 1e-7, and one rounding of a sum of up to 20 nats
    np.testing.assert_allclose(ratios.numpy(), expected, rtol=2e-6)
    np.testing.assert_allclose(truncated_weights(ratios, low, high)[0], np.clip(expected, low, high), rtol=2e-6)
    sure = away_from(expected, high, low or 1e-30)
    inside = (expected >= low) & (expected <= high)
    np.testing.assert_allclose(
        masked_weights(ratios, low, high)[0].numpy()[sure], np.where(inside, expected, 0.0)[sure], rtol=2e-6
    )
    assert (outside_ratio(ratios, low, high).numpy() == ~inside)[sure].all()
    mean = truncated_weights(ratios, low, high)[0].numpy().astype(np.float64).mean()
    normal = normalized_weights(truncated_weights(ratios, low, high)[0], tensors(rows)[2], by_response=False)
    np.testing.assert_allclose(normal, np.clip(expected, low, high) / mean, rtol=3e-6)


@given(responses, st.sampled_from(["k2", "k3"]), st.sampled_from(LEVELS_OF_KL), st.sampled_from([0.01, 0.3, 3.0]))
def test_divergences_are_those_of_numpy(rows: Rows, estimator: str, level: str, above: float) -> None:
    def values(d: np.ndarray) -> np.ndarray:
        v = d**2 / 2 if estimator == "k2" else np.expm1(d) - d
        return {"token": v, "sum": v.sum() + 0 * v, "mean": v.mean() + 0 * v, "max": v.max() + 0 * v}[level]

    expected = np.concatenate([values(d) for d in deltas(rows)])
    found = beyond_divergence(*tensors(rows), estimator, level, above).numpy()
    sure = away_from(expected, above)
    assert (found == (expected > above))[sure].all()


@given(responses, st.sampled_from([1e-4, 0.3, 0.9]))
def test_one_token_vetoes_its_whole_response_and_no_other(rows: Rows, below: float) -> None:
    ratios = importance_ratios(*tensors(rows), "token")
    runs = ratios.split([len(row) for row in rows])
    expected = [bool((run < np.float32(below)).any()) for run in runs for _ in run]
    assert vetoed(ratios, tensors(rows)[2], below).tolist() == expected


@given(st.lists(st.lists(logprobs, min_size=1, max_size=5), min_size=1, max_size=4), st.sampled_from(LEVELS))
def test_nothing_is_changed_where_sampler_and_trainer_agree(rows: list[list[float]], level: str) -> None:
    same = [[(x, x) for x in row] for row in rows]
    ratios = importance_ratios(*tensors(same), level)
    one = bits(torch.ones(len(ratios)))
    assert bits(ratios) == one
    for function in (truncated_weights, masked_weights):
        weights, changes = function(ratios, 0.999, 1.001)
        assert bits(weights) == one and (changes == Correction.NONE).all()
    for by_response in (False, True):
        assert bits(normalized_weights(ratios, tensors(same)[2], by_response)) == one
    assert not outside_ratio(ratios, 0.999, 1.001).any() and not vetoed(ratios, tensors(same)[2], 0.999).any()
    for estimator in ("k2", "k3"):
        assert not any(beyond_divergence(*tensors(same), estimator, at, 1e-12).any() for at in LEVELS_OF_KL)


@given(responses, st.sampled_from(LEVELS[1:]), st.randoms(use_true_random=False))
def test_a_response_does_not_see_the_order_of_its_tokens_nor_its_neighbours(rows: Rows, level: str, random) -> None:
    together = importance_ratios(*tensors(rows), level)
    alone = torch.cat([importance_ratios(*tensors([row]), level) for row in rows])
    shuffled = [random.sample(row, len(row)) for row in rows]
    assert bits(together) == bits(alone) == bits(importance_ratios(*tensors(shuffled), level))


def test_the_documented_column_lists_every_name() -> None:
    (text,) = (column.description for column in UPDATES.columns if column.name == "correction")
    assert all(name in text for name in correction_names(torch.tensor(list(Correction), dtype=torch.uint8)))
