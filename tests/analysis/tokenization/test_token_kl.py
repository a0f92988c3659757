"""KL and entropy by unit: by hand, conserved over units, with the standard errors of their definition."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.analysis.clip_rules import ClipRule
from ppo_repro.analysis.tokenization.token_kl import (
    KL_METRICS,
    estimators,
    response_table,
    summary_table,
    token_table,
    word_table,
)
from ppo_repro.analysis.tokenization.word_clip import clip_table, word_ratios
from ppo_repro.analysis.tokenization.words import BOUNDARIES, Boundary
from tests.analysis.tokenization.cut_texts import Cuts, cuts, frames

boundaries = st.sampled_from(BOUNDARIES)
# sums of a few dozen float64 of ordinary size in another order
CLOSE = 1e-9


def tables(pieces: Cuts, boundary: Boundary, **changes: object) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    tokens, sequences = frames(pieces)
    table = token_table(tokens.assign(**changes), sequences, boundary=boundary)
    return table, word_table(table), response_table(table, sequences)


def value(summary: pd.DataFrame, metric: str, unit: str, reduction: str = "ratio_of_sums") -> pd.Series:
    chosen = summary[(summary[["metric", "unit", "reduction"]] == [metric, unit, reduction]).all(axis=1)]
    (row,) = chosen.to_dict("records")
    return pd.Series(row)


def test_estimators_by_hand() -> None:
    found = estimators(np.array([-1.0, -2.0, -0.5]), np.array([-1.0, -2.0 - math.log(2), -0.5 + math.log(4)]))
    assert found["k1"] == pytest.approx([0.0, math.log(2), -math.log(4)])
    assert found["k3"] == pytest.approx([0.0, 0.5 - 1 + math.log(2), 4 - 1 - math.log(4)])
    assert found["abs_k1"] == pytest.approx([0.0, math.log(2), math.log(4)])
    # exp(-x) - 1 + x for x = 1e-6 would be 0 or 1e-16 instead of x^2 / 2
    assert estimators(np.array([1e-6]), np.array([0.0]))["k3"][0] == pytest.approx(5e-13, rel=1e-3)


def test_units_by_hand() -> None:
    """ "ab cd" as ab| c|d and "é" as é, with their end tokens; k1 is 1, 2, 3, 4 and 5, 6."""
    k1 = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    _, words, by_sequence = tables([["ab", " c", "d"], ["é"]], "leading", old_logprobs=k1, ref_logprobs=0.0)
    assert words["n_chars"].tolist() == [2, 3, 0, 1, 0]
    assert words["n_bytes"].tolist() == [2, 3, 0, 2, 0]
    assert words["k1"].tolist() == [1.0, 5.0, 4.0, 5.0, 6.0]
    assert words["k1_first"].tolist() == [1.0, 2.0, 4.0, 5.0, 6.0]
    sizes = by_sequence[["n_tokens", "n_words", "n_chars", "n_bytes"]]
    assert sizes.to_numpy().tolist() == [[4, 2, 5, 5], [2, 1, 1, 2]]
    assert by_sequence["k1_per_char"].tolist() == [2.0, 11.0]
    assert by_sequence["k1_per_byte"].tolist() == [2.0, 5.5]
    summary = summary_table(by_sequence, words)
    assert value(summary, "k1", "sequence", "seq_mean_token_sum")["value"] == 10.5
    for unit, of_sums, of_ratios in (
        ("token", 21 / 6, 4.0),
        ("word", 7.0, 8.0),
        ("char", 3.5, 6.5),
        ("byte", 3.0, 3.75),
    ):
        assert value(summary, "k1", unit)["value"] == of_sums
        assert value(summary, "k1", unit, "mean_of_ratios")["value"] == of_ratios
    assert value(summary, "abs_k1_first_share", "share")["value"] == 8 / 11
    assert value(summary, "n_tokens", "char")["value"] == 1.0
    assert value(summary, "n_chars", "word")["value"] == 2.0
    # of means 10 and 11: half the difference
    assert value(summary, "k1", "sequence", "seq_mean_token_sum")["se"] == 0.5
    # token mean 3.5: residuals 10 - 14 and 11 - 7, sqrt(2/1 x 32) / 6
    assert value(summary, "k1", "token")["se"] == pytest.approx(8 / 6)


def test_what_has_no_value_is_nan_and_counted() -> None:
    _, words, by_sequence = tables([["a"], []], "leading")
    assert np.isnan(by_sequence["k1_per_char"]).tolist() == [False, True]
    row = value(summary_table(by_sequence, words), "k1", "char", "mean_of_ratios")
    assert (row["n_sequences"], row["n_undefined"]) == (1, 1)
    assert row["value"] == by_sequence["k1"][0]
    _, words, by_sequence = tables([["a", "b"], ["c"]], "leading", ref_logprobs=[-1.0, -np.inf, -1.0, -1.0, -1.0])
    row = value(summary_table(by_sequence, words), "k1", "token")
    assert row["value"] == np.inf
    assert np.isnan(row["se"])
    assert row["n_nonfinite"] == 1
    # terms of k1 cancel, so its sum has no first share
    _, words, by_sequence = tables([["a", "b"]] * 4, "leading", old_logprobs=[1.0, -1.0, 0.0] * 4, ref_logprobs=0.0)
    found = summary_table(by_sequence, words)
    assert np.isnan(value(found, "k1_first_share", "share")["value"])
    assert value(found, "abs_k1_first_share", "share")["value"] == 0.5


@given(cuts(), boundaries)
def test_sums_are_conserved_over_units(pieces: Cuts, boundary: Boundary) -> None:
    table, words, by_sequence = tables(pieces, boundary)
    for name in KL_METRICS:
        total = math.fsum(table[name])
        assert math.fsum(words[name]) == pytest.approx(total, abs=CLOSE)
        assert math.fsum(by_sequence[name]) == pytest.approx(total, abs=CLOSE)
    assert (words["k1"].abs() <= words["abs_k1"] + CLOSE).all()
    assert (words["k3"] >= 0).all()


def test_the_clip_band_in_words_by_hand() -> None:
    """Two tokens at ratio 1.15 are inside a band of 0.2, their word at 1.3225 is not; nor at 1.3 and 0.9 scaled."""
    tokens, sequences = frames([["a", "b", " c", "d"]], ended=False)
    table = token_table(tokens, sequences, boundary="leading")
    rows = {"iteration": 0, "minibatch": 0, "sequence": 0, "position": np.arange(4)}
    anchor = pd.Series(np.full(4, -3.0))
    new = {0: [1.15, 1.15, 1.3, 0.9], 1: [1.0, 1.0, 1.3, 1.3]}
    flags = {0: ["none", "none", "clip_high", "none"], 1: ["none", "none", "wrong_high", "clip_high"]}
    updates = pd.concat(
        [
            pd.DataFrame({**rows, "epoch": e, "new_logprobs": np.log(new[e]) - 3.0, "clip_flag": flags[e]})
            for e in (1, 0)
        ]
    )
    resting = updates.iloc[:2].assign(epoch=2, new_logprobs=np.nan, clip_flag=None)
    words = word_ratios(table, anchor, pd.concat([updates, resting]), ClipRule("token", "old", 0.2, 0.2))
    assert np.exp(words["log_ratio"]).tolist() == pytest.approx([1.3225, 1.17, 1.0, 1.69])
    assert words["n_outside"].tolist() == [0, 1, 0, 2]
    assert words["n_removed"].tolist() == [0, 1, 0, 1]
    assert words["word_outside"].tolist() == [True, False, False, True]
    assert words["word_outside_scaled"].tolist() == [False, False, False, True]  # 1.69 > 1.44 > 1.3225
    found = clip_table(words)
    assert found["outside"].tolist() == [0.25, 0.5]
    assert found["word_outside"].tolist() == [0.5, 0.5]
    assert found["word_ratio_max"].tolist() == pytest.approx([1.3225, 1.69])


def test_a_recorded_nan_stays_in_the_clip_band_of_words() -> None:
    """Null and NaN read as one; where the policy took a step the log-prob is a NaN that training recorded."""
    tokens, sequences = frames([["a", "b", " c"]], ended=False)
    table = token_table(tokens, sequences, boundary="leading")
    rows = {"iteration": 0, "epoch": 0, "minibatch": 0, "sequence": 0, "position": np.arange(3)}
    updates = pd.DataFrame({**rows, "new_logprobs": np.log([np.nan, 1.0, 1.3]) - 3.0, "clip_flag": "none"})
    words = word_ratios(table, pd.Series(np.full(3, -3.0)), updates, ClipRule("token", "old", 0.2, 0.2))
    assert words["n_tokens"].tolist() == [2, 1]
    assert np.exp(words["log_ratio"]).tolist() == pytest.approx([np.nan, 1.3], nan_ok=True)
    assert words["word_outside"].tolist() == [False, True]
    assert clip_table(words)["outside"].tolist() == [pytest.approx(1 / 3)]
