"""Loss aggregation and importance weights: by hand, by definition, and their properties."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.ppo.weights import importance_weights, loss_weights
from tests.support.float32 import bits, finite, tensor

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")
lengths_of = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def test_aggregations_by_hand() -> None:
    lengths = torch.tensor([1, 3])
    assert loss_weights("token_mean", lengths).tolist() == [0.25] * 4
    assert loss_weights("sequence_mean", lengths).tolist() == [0.5, *[float(tensor([1 / 6]))] * 3]
    assert loss_weights("sequence_sum", lengths).tolist() == [0.5] * 4


@given(lengths_of, st.sampled_from(AGGREGATIONS), st.randoms(use_true_random=False))
def test_weights_reduce_losses_as_their_definition_does(lengths: list[int], aggregation: str, random) -> None:
    rows = [[Fraction(random.randint(-64, 64), 8) for _ in range(n)] for n in lengths]
    expected = {
        "token_mean": sum(map(sum, rows)) / sum(lengths),
        "sequence_mean": sum(sum(r) / len(r) for r in rows) / len(rows),
        "sequence_sum": sum(map(sum, rows), Fraction(0)) / len(rows),
    }[aggregation]
    weights = loss_weights(aggregation, torch.tensor(lengths)).tolist()
    found = math.fsum(w * float(x) for w, x in zip(weights, (x for r in rows for x in r), strict=True))
    # each weight is rounded to float32 once
    magnitude = math.fsum(w * abs(float(x)) for w, x in zip(weights, (x for r in rows for x in r), strict=True))
    assert abs(found - float(expected)) <= 2.0**-23 * magnitude


@given(st.integers(1, 9), st.integers(1, 9))
def test_equal_lengths_make_token_and_sequence_mean_one(length: int, count: int) -> None:
    lengths = torch.full((count,), length)
    assert bits(loss_weights("token_mean", lengths)) == bits(loss_weights("sequence_mean", lengths))


def test_a_long_response_counts_more_per_token_mean_and_no_more_per_sequence_mean() -> None:
    """Dividing by each length lets every token of a long wrong answer count less: GRPO's length bias."""
    lengths = torch.tensor([1, 9])
    share = {a: (w[1:].sum() / w.sum()).item() for a in AGGREGATIONS for w in [loss_weights(a, lengths)]}
    assert share["token_mean"] == pytest.approx(0.9, rel=1e-6) and share["sequence_mean"] == pytest.approx(
        0.5, rel=1e-6
    )


logprobs = finite(-8.0, 0.0)
pairs = st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=12)


def weights_of(
    rows: list[tuple[float, float]], lengths: list[int], cap: float, masked: bool, whole: bool
) -> list[float]:
    old, rollout = (tensor(list(column)) for column in zip(*rows, strict=True))
    return importance_weights(old, rollout, torch.tensor(lengths), cap, masked, whole).tolist()


def test_importance_weights_by_hand() -> None:
    two, half = math.log(2.0), math.log(0.5)
    rows = [(0.0, 0.0), (0.0, -two), (half, 0.0), (0.0, -3 * two)]
    assert weights_of(rows, [4], 4.0, False, False) == pytest.approx([1.0, 2.0, 0.5, 4.0], rel=1e-6)
    assert weights_of(rows, [4], 4.0, True, False) == pytest.approx([1.0, 2.0, 0.5, 0.0], rel=1e-6)
    # of the sequences (1, 2) and (1/2, 8): products 2 and 4
    assert weights_of(rows, [2, 2], 5.0, False, True) == pytest.approx([2.0, 2.0, 4.0, 4.0], rel=1e-6)
    assert weights_of(rows, [2, 2], 3.0, True, True) == pytest.approx([2.0, 2.0, 0.0, 0.0], rel=1e-6)


@given(pairs, st.sampled_from([1.5, 2.0, 10.0]))
def test_weights_are_their_definition(rows: list[tuple[float, float]], cap: float) -> None:
    ratios = [math.exp(float(tensor([a]) - tensor([b]))) for a, b in rows]
    truncated = weights_of(rows, [len(rows)], cap, False, False)
    masked = weights_of(rows, [len(rows)], cap, True, False)
    for ratio, low, kept in zip(ratios, truncated, masked, strict=True):
        # what the exponential promises; a ratio at the edge may fall on either side
        assert low == pytest.approx(min(ratio, cap), rel=2e-7)
        if abs(ratio / cap - 1) > 1e-6 and abs(ratio * cap - 1) > 1e-6:
            assert kept == (pytest.approx(ratio, rel=2e-7) if 1 / cap < ratio < cap else 0.0)


@given(st.lists(logprobs, min_size=1, max_size=12), st.booleans(), st.booleans())
def test_weights_are_exactly_one_where_sampler_and_trainer_agree(row: list[float], masked: bool, whole: bool) -> None:
    assert weights_of([(x, x) for x in row], [len(row)], 2.0, masked, whole) == [1.0] * len(row)


@given(pairs, st.randoms(use_true_random=False))
def test_a_sequence_weight_does_not_see_its_neighbours(rows: list[tuple[float, float]], random) -> None:
    cut = random.randint(0, len(rows))
    lengths = [n for n in (cut, len(rows) - cut) if n]
    together = weights_of(rows, lengths, 1e30, False, True)
    alone = [w for part in (rows[:cut], rows[cut:]) if part for w in weights_of(part, [len(part)], 1e30, False, True)]
    assert together == alone
