"""Compute the clip band for words: the bounds that a band for the ratios of tokens implies for the ratio of a word.

The ratio of a word is the product of its tokens' ratios. A band [1 - low, 1 + high] for tokens therefore bounds a word
of n tokens only by [(1 - low)^n, (1 + high)^n], and the share of tokens outside the band depends on the tokenizer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis.clip_flags import is_outside, ratios_of, recorded_clipped
from ppo_repro.analysis.clip_rules import ClipRule
from ppo_repro.records.logprob_pairs import TOKEN_KEY
from ppo_repro.statistics.clusters import Ratio, ratio_of_sums

UPDATE_COLUMNS = ["iteration", "epoch", "minibatch", "sequence", "position", "new_logprobs", "clip_flag"]


class WordRatio(NamedTuple):
    """The ratio of a word in an epoch, and its tokens outside the band: a row of `word_ratios`."""

    iteration: int
    epoch: int
    sequence: int
    word_id: int
    is_special: bool
    n_tokens: int
    log_ratio: float  # sum of the tokens' log-ratios; NaN if one is NaN
    ratio_max: float  # of a token, without NaN
    n_outside: int  # tokens outside the band
    n_removed: int  # tokens with a recorded clip_* flag
    word_outside: bool  # the word's ratio is outside the band
    word_outside_scaled: bool  # the word's ratio is outside [(1 - low)^n, (1 + high)^n], which needs an outside token


class ClipBand(NamedTuple):
    """How much of an epoch was outside the band, with standard errors clustered by response: a row of `clip_table`.

    Shares of tokens include special tokens. Shares of words are of the words of text.
    """

    iteration: int
    epoch: int
    n_tokens: int
    n_words: int
    outside: float
    outside_se: float
    removed: float
    removed_se: float
    word_outside: float
    word_outside_se: float
    word_outside_scaled: float
    word_outside_scaled_se: float
    ratio_max: float
    word_ratio_max: float


def word_ratios(
    token_table: pd.DataFrame, anchor_logprobs: pd.Series, updates: pd.DataFrame, rule: ClipRule
) -> pd.DataFrame:
    """Return a `WordRatio` for each word and epoch of one iteration.

    Ratios are exp(new - anchor) in float64, compared strictly.

    Args:
        token_table: a `TokenRow` for each of N tokens.
        anchor_logprobs: [N], the denominator of the run's ratio.
        updates: UPDATE_COLUMNS; rows of steps that the policy did not take (null) are left out.
        rule: the clip range of the iteration, whose band is [1 - low, 1 + high].
    """
    anchored = token_table[[*TOKEN_KEY, "word_id", "is_special"]].assign(anchor=anchor_logprobs.to_numpy(np.float64))
    visits = updates[updates["clip_flag"].notna()].merge(anchored, on=TOKEN_KEY, validate="many_to_one")
    log_ratios = visits["new_logprobs"].astype(np.float64) - visits["anchor"]
    ratios = ratios_of(log_ratios.to_numpy())
    visits = visits.assign(
        n_tokens=1,
        log_ratio=log_ratios,
        ratio_max=ratios,
        n_outside=is_outside(ratios, rule),
        n_removed=recorded_clipped(visits["clip_flag"]),
        n_nan=log_ratios.isna(),
    )
    keys = ["iteration", "epoch", "sequence", "word_id", "is_special"]
    summed = ["n_tokens", "log_ratio", "n_outside", "n_removed", "n_nan"]
    words = visits.groupby(keys, as_index=False).agg({**dict.fromkeys(summed, "sum"), "ratio_max": "max"})
    words["log_ratio"] = words["log_ratio"].mask(words["n_nan"] > 0)  # the sum leaves out NaN
    word_log_ratios = words["log_ratio"].to_numpy()
    words["word_outside"] = is_outside(ratios_of(word_log_ratios), rule)
    # r < (1 - low)^n is r^(1/n) < 1 - low
    words["word_outside_scaled"] = is_outside(ratios_of(word_log_ratios / words["n_tokens"].to_numpy()), rule)
    return words[[*WordRatio._fields]]


def clip_table(words: pd.DataFrame) -> pd.DataFrame:
    """Return a `ClipBand` for each iteration and epoch, from the rows of `word_ratios`."""
    rows = []
    for _, epoch_words in words.groupby(["iteration", "epoch"], sort=True):
        text_words = epoch_words[~epoch_words["is_special"]].assign(n_words=1)
        outside = _share(epoch_words, "n_outside", "n_tokens")
        removed = _share(epoch_words, "n_removed", "n_tokens")
        word_outside = _share(text_words, "word_outside", "n_words")
        word_outside_scaled = _share(text_words, "word_outside_scaled", "n_words")
        rows.append(
            ClipBand(
                iteration=int(epoch_words["iteration"].iloc[0]),
                epoch=int(epoch_words["epoch"].iloc[0]),
                n_tokens=int(epoch_words["n_tokens"].sum()),
                n_words=len(text_words),
                outside=outside.value,
                outside_se=outside.se,
                removed=removed.value,
                removed_se=removed.se,
                word_outside=word_outside.value,
                word_outside_se=word_outside.se,
                word_outside_scaled=word_outside_scaled.value,
                word_outside_scaled_se=word_outside_scaled.se,
                ratio_max=epoch_words["ratio_max"].max(),
                word_ratio_max=np.exp(text_words["log_ratio"].max()),
            )
        )
    return pd.DataFrame(rows, columns=ClipBand._fields)


def _share(words: pd.DataFrame, count: str, unit: str) -> Ratio:
    """Return the sum of the column `count` divided by the sum of the column `unit`."""
    sums = words.groupby("sequence")[[count, unit]].sum()
    return ratio_of_sums(sums[count].to_numpy(np.float64), sums[unit].to_numpy(np.float64))
