"""Where each token's text lies in a response: characters, bytes and words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from ppo_repro.tasks.tokenizer import Spans, decode, spans, train_bpe

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


def test_the_special_tokens_come_first_and_the_vocabulary_is_bounded() -> None:
    for tokenizer in (SPLIT, MERGED):
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, EOS)
    assert len(SPLIT) < len(MERGED) <= 90
    assert train_bpe(CORPUS, 90).get_vocab() == MERGED.get_vocab()


@TOKENIZERS
@pytest.mark.parametrize("text", CORPUS)
def test_decoding_gives_the_text_back_exactly(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert decode(tokenizer, encode(tokenizer, text)) == text
    assert decode(tokenizer, [0, *encode(tokenizer, text), EOS]) == text
    assert decode(tokenizer, []) == ""


def test_spaces_before_punctuation_survive_decoding() -> None:
    tokenizer = train_bpe(["a . , ' s !"], 30)
    assert decode(tokenizer, encode(tokenizer, "a , a . a ' s !")) == "a , a . a ' s !"


def test_spans_by_hand() -> None:
    ids = [*encode(SPLIT, "at é"), EOS]  # é is two bytes, each a token
    assert len(ids) == 6
    found, text = spans_of(SPLIT, ids)
    assert text == "at é"
    assert found.char_start == [0, 1, 2, 3, 3, 4] and found.char_end == [1, 2, 3, 3, 4, 4]
    assert found.byte_start == [0, 1, 2, 3, 3, 5] and found.byte_end == [1, 2, 3, 3, 5, 5]


def test_words_by_hand() -> None:
    ids = [*encode(SPLIT, "at  on\nx"), EOS]
    found, text = spans_of(SPLIT, ids)
    assert [text[a:b] for a, b in zip(found.char_start, found.char_end, strict=True)] == [*"at  on\nx", ""]
    # a word begins with white space, after white space, and at the end token
    assert found.word_id == [0, 0, 1, 2, 3, 3, 4, 5, 6]
    assert found.sub_idx == [0, 1, 0, 0, 0, 1, 0, 0, 0]


def test_a_leading_space_belongs_to_the_word_it_begins() -> None:
    ids = encode(MERGED, "the the")
    found, text = spans_of(MERGED, ids)
    starts = [text[a:b] for a, b, sub in zip(found.char_start, found.char_end, found.sub_idx, strict=True) if sub == 0]
    assert max(found.word_id) == 1 and len(starts) == 2 and starts[1].startswith(" ") and len(starts[1]) > 1


def test_no_tokens_and_tokens_without_text() -> None:
    assert spans(SPLIT, [], "") == Spans([], [], [], [], [], [])
    assert spans(SPLIT, [EOS], "") == Spans([0], [0], [0], [0], [0], [0])
    found, text = spans_of(SPLIT, [0, EOS, *encode(SPLIT, "a"), EOS])
    assert text == "a" and found.char_start == [0, 0, 0, 1] and found.char_end == [0, 0, 1, 1]


def test_an_unfinished_character_belongs_to_the_last_token_with_text() -> None:
    ids = [*encode(SPLIT, "a世")[:-1], EOS]  # two of the three bytes
    found, text = spans_of(SPLIT, ids)
    assert text == "a\ufffd" and found.char_end == [1, 1, 2, 2] and found.byte_end == [1, 1, 4, 4]


@TOKENIZERS
@given(data=st.data())
def test_spans_are_those_of_decoding_every_prefix(tokenizer: PreTrainedTokenizerFast, data: st.DataObject) -> None:
    pieces = st.sampled_from([encode(tokenizer, text) for text in CORPUS]) | st.lists(
        st.integers(0, len(tokenizer) - 1),
        max_size=6,  # any bytes in any order, and special tokens between them
    )
    ids = [token for piece in data.draw(st.lists(pieces, max_size=6)) for token in piece]
    found, text = spans_of(tokenizer, ids)
    assert found.char_end == slow_ends(tokenizer, ids, text)
    assert found.char_start == [0, *found.char_end[:-1]][: len(ids)]


@TOKENIZERS
@given(data=st.data())
def test_spans_partition_the_text_in_order(tokenizer: PreTrainedTokenizerFast, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    found, text = spans_of(tokenizer, ids)
    rows = list(zip(found.char_start, found.char_end, strict=True))
    assert all(start <= end for start, end in rows)
    assert "".join(text[start:end] for start, end in rows) == text
    raw = text.encode()
    for (start, end), byte_start, byte_end in zip(rows, found.byte_start, found.byte_end, strict=True):
        assert raw[byte_start:byte_end] == text[start:end].encode()
    for token, (start, end) in zip(ids, rows, strict=True):
        assert token not in (0, EOS) or start == end, "a special token has no text"


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


def test_a_character_split_over_tokens_stays_in_its_word() -> None:
    letters = ByteLevel.alphabet()
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *sorted(letters)])}
    bytewise = PreTrainedTokenizerFast(
        tokenizer_object=_byte_tokenizer(vocabulary), pad_token="<pad>", eos_token="<eos>"
    )
    text = "un café é"
    ids = [*bytewise(text)["input_ids"], 1]
    assert len(ids) == len(text.encode()) + 1
    # u n | space | c a f é(2 bytes) | space | é(2 bytes) | end token
    assert spans(bytewise, ids, text).word_id == [0, 0, 1, 2, 2, 2, 2, 2, 3, 4, 4, 5]


def _byte_tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    found = Tokenizer(models.BPE(vocabulary, []))
    found.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return found
