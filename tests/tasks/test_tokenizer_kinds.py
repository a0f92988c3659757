"""The tokenizers a tiny model can have: how each cuts, that each spells, what is refused."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from ppo_repro.config.run import TinyModel
from ppo_repro.errors import UserError
from ppo_repro.models.tiny import check_spelling, make_tokenizer
from ppo_repro.tasks.problems import Problem, arithmetic
from ppo_repro.tasks.tokenizer import decode, spans, train_tokenizer
from tests.support.runs import small_config

KINDS = typing.get_args(TinyModel.model_fields["tokenizer"].annotation)
TEXT = "the cat, in 2024 sat"
CORPUS = [TEXT, "12+7=19", "1234567 cats", "é"]
MADE: dict[str, PreTrainedTokenizerBase] = {kind: train_tokenizer(kind, CORPUS, 80) for kind in KINDS}
every_kind = pytest.mark.parametrize("kind", KINDS)

# merges of the largest vocabulary 80 allow take every piece whole
CUTS = {
    "bpe": ["the", " cat", ",", " in", " 2024", " sat"],
    "bpe_single_digits": ["the", " cat", ",", " in", " ", "2", "0", "2", "4", " sat"],
    "bpe_three_digits": ["the", " cat", ",", " in", " ", "202", "4", " sat"],
    "characters": [*TEXT],
    "words": ["the", " cat", ",", " in", " 2024", " sat"],
}


def pieces(kind: str, text: str) -> list[str]:
    return [decode(MADE[kind], [i]) for i in MADE[kind](text)["input_ids"]]


@every_kind
def test_each_kind_cuts_as_it_says(kind: str) -> None:
    assert pieces(kind, TEXT) == CUTS[kind]


@every_kind
@given(st.text(st.sampled_from("the cat,in2045+=sé"), max_size=30))
def test_what_was_cut_reads_as_it_was(kind: str, text: str) -> None:
    ids = MADE[kind](text)["input_ids"]
    assert decode(MADE[kind], ids) == text
    found = spans(MADE[kind], ids, text)
    assert "".join(text[a:b] for a, b in zip(found.char_start, found.char_end, strict=True)) == text


def test_the_default_is_the_tokenizer_there_was() -> None:
    config = small_config()
    assert isinstance(config.model, TinyModel) and config.model.tokenizer == "bpe"
    default = make_tokenizer(arithmetic(12), 20)
    # ids of the tokenizer before there was a choice; every recorded run of `small.yaml` has them
    assert default("12+7=")["input_ids"] == make_tokenizer(arithmetic(12), 20, "bpe")("12+7=")["input_ids"]
    assert [decode(default, [i]) for i in range(2, 20)] == [*"+0123456789=", "12", "11", "10", "13", "14", "15"]


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("characters", 13, "model.vocab_size = 13: the task's characters alone need 14 tokens; raise it"),
        ("bpe", 13, "model.vocab_size = 13: the task's characters alone need 14 tokens; raise it"),
        ("words", 20, "model.vocab_size = 20: the task's words and characters need 29 tokens; raise it"),
    ],
)
def test_a_vocabulary_that_is_too_small_is_refused_in_one_line(kind: str, size: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_tokenizer(arithmetic(12), size, kind)
    assert str(caught.value) == message


def test_a_character_outside_the_corpus_is_refused_in_one_line() -> None:
    problems = [Problem("a", "ab", "c")]
    with pytest.raises(UserError, match=r"^prompt 'x': has characters that the tokenizer"):
        check_spelling(make_tokenizer(problems, 9, "characters"), [*problems, Problem("x", "xy", "")])
