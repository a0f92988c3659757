"""Words under both conventions for white space, classes of text, and that they partition the text."""

from __future__ import annotations

import itertools

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.analysis.tokenization.words import BOUNDARIES, Boundary, find_words, text_of
from tests.analysis.tokenization.cut_texts import Cuts, cuts, frames

boundaries = st.sampled_from(BOUNDARIES)


def slow_words(pieces: list[str], boundary: Boundary) -> list[int]:
    """The word of every token by the definition, character by character."""
    text = "".join(pieces)
    number, of_character = -1, []
    for i, character in enumerate(text):
        space, before = character.isspace(), text[i - 1].isspace() if i else None
        begins = space and before is False if boundary == "leading" else not space and before is True
        number += before is None or begins
        of_character.append(number)
    found: list[int] = []
    place, word, previous = 0, -1, None
    for piece in pieces:
        inside = range(place, place + len(piece))
        chosen = max((i for i in inside if not text[i].isspace()), default=place + len(piece) - 1)
        word += of_character[chosen] != previous
        previous, place = of_character[chosen], place + len(piece)
        found.append(word)
    return found


def test_the_end_token_is_a_word_of_its_own_and_a_part_of_a_character_is_not() -> None:
    tokens, sequences = frames([["a", "é", " b"], []])
    # é in two tokens: the first has no text yet, and the next one goes on with its word
    halves = tokens.iloc[[1]].assign(char_end=1, byte_end=1, sub_idx=1)
    rest = tokens.iloc[1:4].assign(sub_idx=[2, 0, 0])
    split = pd.concat([tokens.iloc[:1], halves, rest, tokens.iloc[4:]], ignore_index=True)
    split["position"] = [0, 1, 2, 3, 4, 0]
    words = find_words(split, text_of(sequences), "leading")
    assert words.is_special.tolist() == [False, False, False, False, True, True]
    assert words.word_id.tolist() == [0, 0, 0, 1, 2, 0]
    assert words.sub_idx.tolist() == [0, 1, 2, 0, 0, 0]


@given(cuts(), boundaries, st.booleans())
def test_words_are_those_of_the_definition(pieces: Cuts, boundary: Boundary, ended: bool) -> None:
    pieces = [some for some in pieces if some or ended] or [["a"]]
    tokens, sequences = frames(pieces, ended)
    words = find_words(tokens, text_of(sequences), boundary)
    slow = [[*slow_words(some, boundary)] for some in pieces]
    whole = [[*ids, (ids[-1] + 1 if ids else 0)] if ended else ids for ids in slow]
    assert words.word_id.tolist() == [word for ids in whole for word in ids]
    lengths = [len(list(group)) for ids in whole for _, group in itertools.groupby(ids)]
    assert words.sub_len.tolist() == [n for n in lengths for _ in range(n)]
    assert words.sub_idx.tolist() == [i for n in lengths for i in range(n)]
