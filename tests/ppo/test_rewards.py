"""Scores and penalties at the ends of words, and the weights that reduce the losses of tokens to one number."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.ppo.losses import loss_weights
from ppo_repro.ppo.rewards import charge_penalties, place_scores
from tests.support.float32 import bits, tensor

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")


def test_a_word_ends_with_its_response() -> None:
    """Words are counted within a response, so the numbers on both sides of a border may be equal."""
    lengths, words = torch.tensor([2, 1, 2]), torch.tensor([0, 0, 0, 0, 1])
    scores, penalties = torch.tensor([3.0, 5.0, 8.0], dtype=torch.float64), torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert place_scores(scores, lengths, words, "word_ends").tolist() == [0.0, 3.0, 5.0, 4.0, 4.0]
    assert charge_penalties(penalties, lengths, words, "word").tolist() == [0.0, 3.0, 4.0, 8.0, 16.0]


def test_aggregations_by_hand() -> None:
    lengths = torch.tensor([1, 3])
    assert loss_weights("token_mean", lengths).tolist() == [0.25] * 4
    assert loss_weights("sequence_mean", lengths).tolist() == [0.5, *[float(tensor([1 / 6]))] * 3]
    assert loss_weights("sequence_sum", lengths).tolist() == [0.5] * 4


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from(AGGREGATIONS), st.data())
def test_weights_reduce_losses_as_their_definition_does(lengths: list[int], aggregation: str, data) -> None:
    total = sum(lengths)
    values = data.draw(st.lists(st.integers(-64, 64), min_size=total, max_size=total))
    rows = torch.split(torch.tensor(values, dtype=torch.float64), lengths)
    expected = {
        "token_mean": sum(values) / total,
        "sequence_mean": math.fsum(float(row.mean()) for row in rows) / len(rows),
        "sequence_sum": sum(values) / len(rows),
    }[aggregation]
    weights = loss_weights(aggregation, torch.tensor(lengths))
    # each weight is rounded to float32 once
    magnitude = math.fsum(w * abs(x) for w, x in zip(weights.tolist(), values, strict=True))
    found = math.fsum(w * x for w, x in zip(weights.tolist(), values, strict=True))
    assert abs(found - expected) <= 2.0**-23 * magnitude + 1e-12
    assert bits(loss_weights(aggregation, torch.tensor(lengths), torch.ones(total, dtype=torch.bool))) == bits(weights)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=6), st.sampled_from(AGGREGATIONS))
def test_tokens_that_are_left_out_might_as_well_not_be_there(rows: list[list[bool]], aggregation: str) -> None:
    counted = torch.tensor([is_in for row in rows for is_in in row])
    weights = loss_weights(aggregation, torch.tensor([len(row) for row in rows]), counted)
    remaining = [sum(row) for row in rows if any(row)]
    assert bits(weights[~counted]) == [0] * int((~counted).sum())
    if remaining:
        assert bits(weights[counted]) == bits(loss_weights(aggregation, torch.tensor(remaining)))
