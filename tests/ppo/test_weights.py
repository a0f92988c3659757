"""Loss aggregation: by hand, by definition, and its properties."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.ppo.weights import loss_weights
from tests.support.float32 import bits, tensor

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


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=6), st.sampled_from(AGGREGATIONS))
def test_tokens_that_are_left_out_might_as_well_not_be_there(rows: list[list[bool]], aggregation: str) -> None:
    counted = torch.tensor([is_in for row in rows for is_in in row])
    weights = loss_weights(aggregation, torch.tensor([len(row) for row in rows]), counted)
    remaining = [sum(row) for row in rows if any(row)]
    assert bits(weights[~counted]) == [0] * int((~counted).sum())
    if remaining:
        assert bits(weights[counted]) == bits(loss_weights(aggregation, torch.tensor(remaining)))


@given(lengths_of, st.sampled_from(AGGREGATIONS))
def test_to_leave_out_no_token_changes_no_bit(lengths: list[int], aggregation: str) -> None:
    every = torch.ones(sum(lengths), dtype=torch.bool)
    here = torch.tensor(lengths)
    assert bits(loss_weights(aggregation, here, every)) == bits(loss_weights(aggregation, here))
