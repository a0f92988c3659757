"""Where each token's text lies in a response: characters, bytes and words."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ppo_repro.base.errors import UserError
from ppo_repro.config.model import TinyModel
from ppo_repro.models.tiny import check_spelling, make_tokenizer
from ppo_repro.tasks import tokenizer as tokenizer_module
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.tokenizer import Spans, decode, spans, train_bpe, train_tokenizer

EOS = 1
CORPUS = ["the cat sat on the mat", "café café naïve", "世界 世", "😀 x", "12 + 7 = 19\n", "\ufffd a"]
# the first knows every byte of the corpus on its own, so that characters fall apart; the second has merges
SPLIT = train_bpe(CORPUS, 10)
MERGED = train_bpe(CORPUS, 90)
TOKENIZERS = pytest.mark.parametrize("tokenizer", [SPLIT, MERGED], ids=["bytes", "merges"])


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def spans_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> tuple[Spans, str]:
    text = decode(tokenizer, ids)
    return spans(tokenizer, ids, text), text


def slow_ends(tokenizer: PreTrainedTokenizerFast, ids: list[int], text: str) -> list[int]:
    """Characters complete after each token, by decoding every prefix; the last token with text takes what is left."""
    ends = []
    for i in range(len(ids)):
        prefix = decode(tokenizer, ids[: i + 1])
        complete = len(prefix) if not prefix.endswith("\ufffd") else (ends[-1] if ends else 0)
        # the text of all later tokens may finish a character, but never shortens the text
        ends.append(min(complete, len(text)))
    with_text = [i for i, token in enumerate(ids) if token not in (0, EOS)]
    return [len(text) if with_text and i >= with_text[-1] else end for i, end in enumerate(ends)]


@TOKENIZERS
@given(data=st.data())
def test_spans_are_those_of_decoding_every_prefix(tokenizer: PreTrainedTokenizerFast, data: st.DataObject) -> None:
    pieces = st.sampled_from([encode(tokenizer, text) for text in CORPUS]) | st.lists(
        st.integers(0, len(tokenizer) - 1),
        max_size=20,  # any bytes in any order, and special tokens between them
    )
    ids = [token for piece in data.draw(st.lists(pieces, max_size=6)) for token in piece]
    found, text = spans_of(tokenizer, ids)
    assert found.char_end == slow_ends(tokenizer, ids, text)
    assert found.char_start == [0, *found.char_end[:-1]][: len(ids)]


def test_bytes_of_no_character_are_decoded_a_few_times_each(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    def counting(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
        decoded.append(len(ids))
        return decode(tokenizer, ids)

    second_byte = encode(SPLIT, "é")[1]
    assert decode(SPLIT, [second_byte] * 3) == "\ufffd" * 3
    ids = [second_byte] * 500
    text = decode(SPLIT, ids)
    monkeypatch.setattr(tokenizer_module, "decode", counting)
    assert spans(SPLIT, ids, text).char_end == [0] * 499 + [500]
    assert sum(decoded) < 30 * len(ids)


@TOKENIZERS
@given(st.lists(st.sampled_from(["the", " cat", " ", "12", "\n", " sat on"]), min_size=1, max_size=8), st.booleans())
def test_words_are_cut_at_white_space(tokenizer: PreTrainedTokenizerFast, pieces: list[str], ended: bool) -> None:
    ids = encode(tokenizer, "".join(pieces)) + [EOS] * ended
    found, text = spans_of(tokenizer, ids)
    word, sub = -1, 0
    for t, (start, end) in enumerate(zip(found.char_start, found.char_end, strict=True)):
        begins = t == 0 or start == end or text[start].isspace() or text[start - 1].isspace()
        word, sub = (word + 1, 0) if begins else (word, sub + 1)
        assert (found.word_id[t], found.sub_idx[t]) == (word, sub)


def test_an_end_of_turn_that_the_tokenizer_does_not_name_is_a_word_of_its_own() -> None:
    """As Gemma's `<end_of_turn>`: special among the added tokens, but neither end, padding nor beginning."""
    tokenizer = train_bpe(CORPUS, 10)
    tokenizer.backend_tokenizer.add_special_tokens(["<turn>"])
    turn, part = tokenizer.convert_tokens_to_ids("<turn>"), encode(tokenizer, "é")[0]
    assert turn not in tokenizer.all_special_ids
    found, text = spans_of(tokenizer, [*encode(tokenizer, "12"), part, turn])
    assert text == "12\ufffd"
    assert found.char_end == [1, 2, 3, 3], "half a character belongs to the last token that can have text"
    assert found.word_id == [0, 0, 0, 1]


KINDS = typing.get_args(TinyModel.model_fields["tokenizer"].annotation)
TEXT = "the cat, in 2024 sat"
KIND_CORPUS = [TEXT, "12+7=19", "1234567 cats", "é"]
MADE: dict[str, PreTrainedTokenizerBase] = {kind: train_tokenizer(kind, KIND_CORPUS, 80) for kind in KINDS}
every_kind = pytest.mark.parametrize("kind", KINDS)

# merges of the largest vocabulary 80 allow take every piece whole
CUTS = {
    "bpe": ["the", " cat", ",", " in", " 2024", " sat"],
    "characters": [*TEXT],
    "words": ["the", " cat", ",", " in", " 2024", " sat"],
}


def cut_by(kind: str, text: str) -> list[str]:
    return [decode(MADE[kind], [i]) for i in MADE[kind](text)["input_ids"]]


@every_kind
def test_each_kind_cuts_as_it_says(kind: str) -> None:
    assert cut_by(kind, TEXT) == CUTS[kind]


@every_kind
@given(st.text(st.sampled_from("the cat,in2045+=sé"), max_size=30))
def test_what_was_cut_reads_as_it_was(kind: str, text: str) -> None:
    ids = MADE[kind](text)["input_ids"]
    assert decode(MADE[kind], ids) == text
    found = spans(MADE[kind], ids, text)
    assert "".join(text[a:b] for a, b in zip(found.char_start, found.char_end, strict=True)) == text


def test_a_character_outside_the_corpus_is_refused_in_one_line() -> None:
    problems = [Problem("a", "ab", "c")]
    with pytest.raises(UserError, match=r"^prompt 'x': has characters that the tokenizer"):
        check_spelling(make_tokenizer(problems, 9, "characters"), [*problems, Problem("x", "xy", "")])
