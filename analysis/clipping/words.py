"""The clip in units of words: a word of n tokens may move by (1 +- eps)^n without any token leaving the band."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.flags import ratios_of, token_flags
from analysis.clipping.update_rows import IterationRows, policy_rows


def word_ratios(item: IterationRows) -> pd.DataFrame:
    """One row per word and policy step: n_tok, log_ratio (sum over its tokens, nats) and flags.

    any_token_out: a token is in band_out. token_band_out: the word's ratio is outside [1 - low, 1 + high].
    word_band_out: outside [(1 - low)^n, (1 + high)^n], compared as sums of logs.
    """
    rows, rule = policy_rows(item), item.rule
    flags = token_flags(rows, rule)
    keys = ["epoch", "minibatch", "sequence", "word_id"]
    tokens = rows[keys].assign(log_ratio=rows["log_ratios"], any_token_out=flags["band_out"], n_tok=1)
    words = tokens.groupby(keys, sort=False, as_index=False).agg(
        log_ratio=("log_ratio", "sum"), any_token_out=("any_token_out", "any"), n_tok=("n_tok", "sum")
    )
    ratio = ratios_of(words["log_ratio"].to_numpy(np.float64))
    words["token_band_out"] = (ratio > 1.0 + rule.high) | (ratio < 1.0 - rule.low)
    upper, lower = words["n_tok"] * np.log1p(rule.high), words["n_tok"] * np.log1p(-rule.low)
    words["word_band_out"] = (words["log_ratio"] > upper) | (words["log_ratio"] < lower)
    return words


def clip_words(item: IterationRows) -> pd.DataFrame:
    """One row per epoch and number of tokens in a word: words, and the share in each class of `word_ratios`."""
    words = word_ratios(item)
    keys = ["epoch", "n_tok"]
    rates = words.groupby(keys, as_index=False)[["any_token_out", "token_band_out", "word_band_out"]].mean()
    counts = words.groupby(keys, as_index=False).size().rename(columns={"size": "n_words"})
    return counts.merge(rates, on=keys).assign(iteration=item.iteration)
