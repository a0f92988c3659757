"""How tokenizers cut English text: cases by hand, with tokenizers made here whose merges are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from experiments.tokenization.real_tokenizers import (
    Cutter,
    border,
    from_json,
    of_borders,
    of_cuts,
    of_number,
    of_text,
)

DRAWN = 1000
TEXT = "the cat sat on the 12 mats, then the dog sat on 345 cats; " * 20


def made(tmp_path: Path, merges: Sequence[tuple[str, str]], name: str = "made") -> Cutter:
    """A byte-level tokenizer with all bytes and some merges."""
    pieces = [*pre_tokenizers.ByteLevel.alphabet(), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / f"{name}.json"))
    return from_json(name, tmp_path / f"{name}.json")


WORDS = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "t"), ("c", "at"), ("Ġ", "cat"), ("1", "2")]


def test_what_lies_around_a_border() -> None:
    text = "ab 12."
    expected = ["within a word", "before a space", "after a space", "within a number", "other"]
    assert [border(text, at) for at in range(1, 6)] == expected


def test_a_text_cut_by_hand(tmp_path: Path) -> None:
    found = of_text(made(tmp_path, WORDS), "the cat")
    # the| cat: 2 tokens of 7 bytes; of single words " the" and " cat" are one token
    assert found == {
        "vocabulary": 256 + len(WORDS),
        "tokens / word": 1.0,
        "bytes / token": 3.5,
        "words of one token": 1.0,
        "other cuts of a token in two": 1.0,  # the: th|e; cat: " "|cat, for " c" is no token
    }


def test_single_bytes_have_no_other_ids_anywhere(tmp_path: Path) -> None:
    bytes_only = made(tmp_path, [])
    assert (of_borders(bytes_only, TEXT, DRAWN).dropna() == 0).all()
    assert of_cuts(bytes_only, TEXT, DRAWN) == {"other ids": 0.0, "no text": 0.0}
    assert of_number(bytes_only) == "1 2 3 4 5 6 7"
    # but a cut between the bytes of a character has no text
    assert of_cuts(bytes_only, "é" * 200, DRAWN)["no text"] > 0.5


def test_a_merge_over_a_border_gives_other_ids(tmp_path: Path) -> None:
    found = of_borders(made(tmp_path, WORDS), TEXT, DRAWN)
    assert found["before a space"] == 0, "a space begins a token, so nothing merges over the border before it"
    # by definition, over every border after a space of one period of the text
    cutter, at = made(tmp_path, WORDS), [i for i in range(401, 458) if TEXT[i - 1] == " "]
    other = [cutter.encode(TEXT[:i]) + cutter.encode(TEXT[i:]) != cutter.encode(TEXT) for i in at]
    assert found["after a space"] == pytest.approx(sum(other) / len(other), abs=0.15)  # of 200 borders drawn
    assert 0 < found["within a number"] < 1, "1|2 merges, 3|4 does not"
