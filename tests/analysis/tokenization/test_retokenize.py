"""Encoding decoded text again, the card of a tokenizer, and all segmentations of a text."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.tokenization.kl import token_table, word_table
from analysis.tokenization.marginal import (
    count_segmentations,
    exact_marginal,
    importance_marginal,
    segmentation_logprob,
    segmentations,
)
from analysis.tokenization.retokenize import drift_summary, edit_operations, noncanonical_words, retokenization
from analysis.tokenization.tokenizer import (
    RecordedTokenizer,
    load_tokenizer,
    recorded_tokenizer,
    token_bytes,
    tokenizer_card,
)
from ppo_repro.errors import UserError
from ppo_repro.tasks.tokenizer import train_tokenizer
from tests.support.cases.tokens import frames

CORPUS = ["aa ab 12", "aab ab", "12 + 34", "é 世"] * 3
KINDS = ("bpe", "bpe_single_digits", "characters", "words")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedTokenizer]:
    """Recorded tokenizers of several kinds."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind) / "checkpoints" / "final"
        train_tokenizer(kind, CORPUS, 40).save_pretrained(folder)
        found[kind] = recorded_tokenizer(folder.parent.parent)
    return found


def responses(tokenizer: RecordedTokenizer, rows: list[list[int]], stopped: bool) -> pd.DataFrame:
    ids = [[*row, 1] if stopped else row for row in rows]
    return pd.DataFrame(
        {
            "iteration": 0,
            "sequence": np.arange(len(rows)),
            "response": tokenizer.decode(rows),
            "response_ids": ids,
            "finish_reason": "stop" if stopped else "length",
        }
    )


def slow_edits(a: list[int], b: list[int]) -> int:
    """The recursive definition."""
    if not a or not b:
        return len(a) + len(b)
    if a[-1] == b[-1]:
        return slow_edits(a[:-1], b[:-1])
    return 1 + min(slow_edits(a[:-1], b), slow_edits(a, b[:-1]), slow_edits(a[:-1], b[:-1]))


@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_edit_operations_are_those_of_the_definition(a: list[int], b: list[int]) -> None:
    assert edit_operations(a, b) == slow_edits(a, b)


def test_drift_by_hand(tokenizers: dict[str, RecordedTokenizer]) -> None:
    """`ab` in two tokens where the tokenizer has one; the same text cut as it cuts it does not drift."""
    tokenizer = tokenizers["bpe"]
    (a,), (b,), (ab,) = tokenizer.encode(["a", "b", "ab"])
    found = retokenization(responses(tokenizer, [[a, b], [ab], [ab, a, b]], True), tokenizer)
    assert found["drifted"].tolist() == [True, False, True] and found["n_tok"].tolist() == [2, 1, 3]
    assert found["edits"][0] == 2 and found["len_delta"][0] == -1 and found["first_drift_pos"][0] == 0
    assert math.isnan(found["first_drift_pos"][1])
    again = tokenizer.encode(["abab"])[0]
    assert found["edits"][2] == slow_edits([ab, a, b], again)


def test_noncanonical_words_by_hand(tokenizers: dict[str, RecordedTokenizer]) -> None:
    tokenizer = tokenizers["bpe"]
    (a,), (b,), (ab,), (space_ab,) = tokenizer.encode(["a", "b", "ab", " ab"])
    rows = [[a, b, space_ab], [ab, space_ab]]
    tokens, sequences = frames([["a", "b", " ab"], ["ab", " ab"]])
    tokens["token_id"] = [*rows[0], 1, *rows[1], 1]
    words = word_table(token_table(tokens, sequences, boundary="leading", gamma=None, gae_lambda=None), sequences)
    flags = noncanonical_words(words, tokens["token_id"], tokenizer)
    assert flags.tolist() == [True, False, False, False, False, False]
    summary = drift_summary(retokenization(responses(tokenizer, rows, True), tokenizer), words, flags)
    assert summary["noncanonical_word_frac"] == 0.25 and summary["drift_seq_frac"] == 0.5
    assert summary["drift_token_frac"] == 2 / 5
    strange = drift_summary(retokenization(responses(tokenizer, rows[1:] * 2, True), tokenizer), words, flags)
    assert math.isnan(strange["noncanonical_word_frac"]), "no response drifted, so words are not encoded one by one"


def test_a_special_token_inside_a_response_is_drift(tokenizers: dict[str, RecordedTokenizer]) -> None:
    tokenizer = tokenizers["characters"]
    (a,) = tokenizer.encode(["a"])[0]
    found = retokenization(responses(tokenizer, [[a, 0, a], [a, a]], False), tokenizer)
    assert found["drifted"].tolist() == [True, False] and found["edits"].tolist() == [1, 0]


def test_a_tokenizer_of_another_run_is_refused(tokenizers: dict[str, RecordedTokenizer]) -> None:
    table = responses(tokenizers["bpe"], tokenizers["bpe"].encode(["ab ab"]), True)
    with pytest.raises(UserError, match=r"^tokenizer: decodes response 0 as .*, recorded is 'ab ab'; restore"):
        retokenization(table, tokenizers["words"])


def test_a_run_without_a_tokenizer_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer.json, looked for checkpoints/final/tokenizer.json and"):
        recorded_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(UserError, match=r"cannot be read .*; restore the run's$"):
        load_tokenizer(path)


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.text(st.sampled_from("ab 12é世+"), max_size=12), min_size=1, max_size=4))
def test_encoding_what_was_decoded_repeats_itself(
    tokenizers: dict[str, RecordedTokenizer], kind: str, texts: list[str]
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(texts)
    assert tokenizer.decode(ids) == texts and tokenizer.encode(tokenizer.decode(ids)) == ids
    assert not retokenization(responses(tokenizer, ids, True), tokenizer)["drifted"].any()
    spelled = token_bytes(tokenizer)
    assert [b"".join(spelled[i] for i in row).decode() for row in ids] == texts


def test_cards_by_hand(tokenizers: dict[str, RecordedTokenizer]) -> None:
    cards = {kind: tokenizer_card(tokenizers[kind], ["aa ab 12", "ab"]) for kind in KINDS}
    assert len({card.tokenizer_id for card in cards.values()}) == len(KINDS)
    assert {kind: card.digit_policy for kind, card in cards.items()} == {
        "bpe": "up_to_2",
        "bpe_single_digits": "single",
        "characters": "single",
        "words": "up_to_2",
    }
    assert cards["characters"].fertility_tok_char == 1.0 and cards["characters"].fertility_tok_word == 2.5
    # `ab` at the start of a text is no word of the corpus: aa| ab| 12 and a|b
    assert cards["words"].fertility_tok_word == 5 / 4 and cards["words"].pct_words_single == 75.0
    assert cards["characters"].pct_words_single == 0.0 and cards["words"].merges == 0 < cards["bpe"].merges
    assert cards["bpe"].pre_tokenizer == "ByteLevel" and cards["characters"].pre_tokenizer == "none"
    assert cards["bpe_single_digits"].pre_tokenizer.startswith("Split(") and cards["bpe"].type == "BPE"
    assert "a" not in cards["bpe"].round_trip_failures and "a, b. c!" in cards["bpe"].round_trip_failures
    with pytest.raises(UserError, match=r"^texts: have no word"):
        tokenizer_card(tokenizers["bpe"], [" "])


VOCABULARY = {0: b"", 1: b"a", 2: b"b", 3: b"ab", 4: b"ba", 5: b"aba"}


def model(seed: int):
    """Random conditionals, one set for every prefix, that give the end token 0 a part."""

    def ask(prefix: tuple[int, ...]) -> np.ndarray:
        weights = np.random.default_rng([seed, *prefix, len(prefix)]).exponential(1.0, len(VOCABULARY))
        return np.log(weights / weights.sum())

    return ask


def test_segmentations_by_hand() -> None:
    assert list(segmentations(b"aba", VOCABULARY)) == [(1, 2, 1), (1, 4), (3, 1), (5,)]
    assert count_segmentations(b"aba", VOCABULARY) == 4 and list(segmentations(b"", VOCABULARY)) == [()]
    assert list(segmentations(b"ac", VOCABULARY)) == []


@given(st.text("ab", max_size=7), st.integers(0, 5), st.sampled_from([None, 0]))
def test_the_marginal_is_the_sum_over_all_cuts(text: str, seed: int, end_id: int | None) -> None:
    ids = [i for i in VOCABULARY if VOCABULARY[i]]
    spelled = [
        cut
        for n in range(len(text) + 1)
        for cut in itertools.product(ids, repeat=n)
        if n <= 4 and b"".join(VOCABULARY[i] for i in cut) == text.encode()
    ]
    found = exact_marginal(text.encode(), VOCABULARY, model(seed), end_id=end_id, max_segmentations=1000)
    every = list(segmentations(text.encode(), VOCABULARY))
    assert set(spelled) <= set(every) and len(every) == found.segmentations == count_segmentations(
        text.encode(), VOCABULARY
    )
    logprobs = [segmentation_logprob(cut, model(seed), end_id=end_id) for cut in every]
    assert found.logprob == pytest.approx(math.log(math.fsum(math.exp(x) for x in logprobs)), abs=1e-12)
    assert found.se == 0.0 and all(found.logprob >= x for x in logprobs), "whatever cut is the canonical one"


@pytest.mark.parametrize("seed", range(3))
def test_importance_sampling_meets_the_exact_marginal(seed: int) -> None:
    text = b"abaabab"
    exact = exact_marginal(text, VOCABULARY, model(seed), end_id=0, max_segmentations=1000)
    found = importance_marginal(
        text, VOCABULARY, model(seed), end_id=0, draws=2000, generator=np.random.default_rng(seed)
    )
    # the draws are fixed; four standard errors is where a wrong weight would lie far outside
    assert 0 < found.se < 0.1 and abs(found.logprob - exact.logprob) < 4 * found.se
    assert 1 <= found.effective <= 2000
    one_cut = importance_marginal(
        b"b", {2: b"b", 0: b""}, model(seed), end_id=None, draws=2, generator=np.random.default_rng(0)
    )
    assert one_cut.logprob == pytest.approx(float(model(seed)(())[2])) and one_cut.se == pytest.approx(0.0, abs=1e-15)


def test_marginals_refuse_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^max_segmentations = 3: the text has 4 segmentations; raise it, or"):
        exact_marginal(b"aba", VOCABULARY, model(0), end_id=None, max_segmentations=3)
    with pytest.raises(UserError, match=r"^text = b'c': no tokens spell it"):
        exact_marginal(b"c", VOCABULARY, model(0), end_id=None, max_segmentations=3)
    with pytest.raises(UserError, match=r"^draws = 1: must be at least 2"):
        importance_marginal(b"a", VOCABULARY, model(0), end_id=None, draws=1, generator=np.random.default_rng(0))
