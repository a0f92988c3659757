"""From scores and KL estimates to per-token rewards: placement, charging."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.ppo.rewards import charge_penalties, place_scores, word_lengths
from tests.support.float32 import tensor

CHARGES = ("token", "word", "length_normalized", "last_sum", "last_mean")
# responses as lists of word lengths
responses_of = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=5)


def columns(responses: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """lengths [B], word_ids [N]."""
    words = [index for response in responses for index, size in enumerate(response) for _ in range(size)]
    return torch.tensor([sum(response) for response in responses]), torch.tensor(words)


def test_placements_by_hand() -> None:
    lengths, words = columns([[2, 1], [1]])
    scores = torch.tensor([6.0, -1.0], dtype=torch.float64)
    assert place_scores(scores, lengths, words, "last").tolist() == [0, 0, 6, -1]
    assert place_scores(scores, lengths, words, "word_ends").tolist() == [0, 3, 3, -1]


@given(responses_of, st.sampled_from(["last", "word_ends"]), st.data())
def test_every_placement_pays_the_whole_score(responses: list[list[int]], placement: str, data) -> None:
    lengths, words = columns(responses)
    scores = data.draw(st.lists(st.floats(-100, 100), min_size=len(responses), max_size=len(responses)))
    found = place_scores(torch.tensor(scores, dtype=torch.float64), lengths, words, placement)
    for part, score in zip(torch.split(found, lengths.tolist()), scores, strict=True):
        assert math.fsum(part.tolist()) == pytest.approx(score, rel=1e-14, abs=1e-300)


@given(responses_of)
def test_words_of_neighbouring_responses_stay_apart(responses: list[list[int]]) -> None:
    lengths, words = columns(responses)
    assert word_lengths(words, lengths).tolist() == [size for response in responses for size in response]


def test_charges_by_hand() -> None:
    lengths, words = columns([[2, 1], [1]])
    penalties = tensor([1.0, 2.0, 4.0, 8.0])
    found = {charge: charge_penalties(penalties, lengths, words, charge).tolist() for charge in CHARGES}
    assert found == {
        "token": [1, 2, 4, 8],
        "word": [0, 3, 4, 8],
        "length_normalized": [tensor([1 / 3]).item(), tensor([2 / 3]).item(), tensor([4 / 3]).item(), 8],
        "last_sum": [0, 0, 7, 8],
        "last_mean": [0, 0, tensor([7 / 3]).item(), 8],
    }
    assert penalties.tolist() == [1, 2, 4, 8], "what is recorded elsewhere must not change"


@given(responses_of, st.data())
def test_charges_conserve_sum_or_mean(responses: list[list[int]], data) -> None:
    lengths, words = columns(responses)
    total = int(lengths.sum())
    penalties = tensor(data.draw(st.lists(st.floats(-4, 4, width=32), min_size=total, max_size=total)))
    for charge in CHARGES:
        charged = charge_penalties(penalties, lengths, words, charge)
        assert charged.dtype == torch.float32
        parts = zip(torch.split(charged, lengths.tolist()), torch.split(penalties, lengths.tolist()), strict=True)
        for found, given_ in parts:
            paid, owed = math.fsum(found.tolist()), math.fsum(given_.tolist())
            if charge in ("length_normalized", "last_mean"):
                owed /= len(given_)
            # each charged number is rounded to float32 once
            magnitude = math.fsum(abs(x) for x in given_.tolist())
            assert abs(paid - owed) <= 2.0**-23 * magnitude + 1e-30


def test_splitting_a_word_makes_its_total_dearer_only_per_token() -> None:
    """A tokenizer that cuts a word into pieces of equal KL: the sum grows with the pieces, the word mean does not."""
    one, four = tensor([0.5]), tensor([0.5] * 4)
    for charge, ratio in (
        ("token", 4.0),
        ("word", 4.0),
        ("last_sum", 4.0),
        ("length_normalized", 1.0),
        ("last_mean", 1.0),
    ):
        whole = charge_penalties(one, torch.tensor([1]), torch.zeros(1, dtype=torch.int64), charge).sum()
        split = charge_penalties(four, torch.tensor([4]), torch.zeros(4, dtype=torch.int64), charge).sum()
        assert (split / whole).item() == ratio
    # KL that is the same in total, spread over more tokens, costs the same: no chain-rule total depends on the split
    spread = charge_penalties(one.repeat(4) / 4, torch.tensor([4]), torch.zeros(4, dtype=torch.int64), "last_sum").sum()
    assert spread.item() == 0.5
