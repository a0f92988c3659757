"""Encoding decoded text again with recorded tokenizers of several kinds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.analysis.tokenization.recorded_tokenizer import RecordedTokenizer, load_tokenizer, recorded_tokenizer
from ppo_repro.analysis.tokenization.retokenize import drift_summary, retokenization
from ppo_repro.base.errors import UserError
from ppo_repro.tasks.tokenizer import train_tokenizer

CORPUS = ["aa ab 12", "aab ab", "12 + 34", "é 世"] * 3
KINDS = ("bpe", "bpe_single_digits", "characters", "words")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedTokenizer]:
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind) / "checkpoints" / "final"
        train_tokenizer(kind, CORPUS, 40).save_pretrained(folder)
        found[kind] = recorded_tokenizer(folder.parent.parent)
    return found


def responses(tokenizer: RecordedTokenizer, rows: list[list[int]], stopped: bool) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "iteration": 0,
            "sequence": np.arange(len(rows)),
            "response": tokenizer.decode(rows),
            "response_ids": [[*row, 1] if stopped else row for row in rows],
            "finish_reason": "stop" if stopped else "length",
        }
    )


def test_a_run_of_several_turns_is_refused_by_the_name_of_the_command(tokenizers: dict[str, RecordedTokenizer]) -> None:
    rows = responses(tokenizers["characters"], [[2, 3]], True).assign(episode_ids=[[2, 3, 4, 1]])
    with pytest.raises(UserError, match="analyse tokenization is for runs of one turn"):
        retokenization(rows, tokenizers["characters"])


def test_drift_by_hand(tokenizers: dict[str, RecordedTokenizer]) -> None:
    """`ab` in two tokens where the tokenizer has one; the same text cut as it cuts it does not drift."""
    tokenizer = tokenizers["bpe"]
    (a,), (b,), (ab,) = tokenizer.encode(["a", "b", "ab"])
    found = retokenization(responses(tokenizer, [[a, b], [ab], [ab, ab, a, b]], True), tokenizer)
    assert found["drifted"].tolist() == [True, False, True]
    assert found["n_tokens"].tolist() == [2, 1, 4]
    assert found["length_delta"][0] == -1
    assert found["first_drift_position"][0] == 0
    assert math.isnan(found["first_drift_position"][1])
    summary = drift_summary(found)
    assert summary.frac_drifted == pytest.approx(2 / 3)
    assert summary.frac_drifted_se == pytest.approx(math.sqrt(3 / 2 * (1 / 9 + 4 / 9 + 1 / 9)) / 3)


def test_what_is_not_the_runs_tokenizer_is_refused(tokenizers: dict[str, RecordedTokenizer], tmp_path: Path) -> None:
    table = responses(tokenizers["bpe"], tokenizers["bpe"].encode(["ab ab"]), True)
    with pytest.raises(UserError, match=r"^tokenizer: decodes response 0 as .*, recorded is 'ab ab'; restore"):
        retokenization(table, tokenizers["words"])
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
    assert tokenizer.decode(ids) == texts
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert not retokenization(responses(tokenizer, ids, True), tokenizer)["drifted"].any()
