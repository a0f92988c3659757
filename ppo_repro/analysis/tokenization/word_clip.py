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
from ppo_repro.statistics.clusters import Ratio, ratio_of_sums

UPDATE_COLUMNS = ["iteration", "epoch", "minibatch", "sequence", "position", "new_logprobs", "clip_flag"]


def word_ratios(
    token_table: pd.DataFrame, anchor_logprobs: pd.Series, updates: pd.DataFrame, rule: ClipRule
) -> pd.DataFrame:
    """Return one row per word and epoch of one iteration: log-ratio, and the tokens outside the band.

    Ratios are exp(new - anchor) in float64, compared strictly.

    Args:
        token_table: the frame of `token_kl.token_table`, one row for each of N tokens.
        anchor_logprobs: [N], the denominator of the run's ratio.
        updates: UPDATE_COLUMNS; rows of steps that the policy did not take (null) are left out.
        rule: the clip range of the iteration, whose band is [1 - low, 1 + high].

    Returns:
        The columns iteration, epoch, sequence, word_id, is_special, and

        n_tokens: number of the word's tokens
        log_ratio: sum of the tokens' log-ratios; NaN if one is NaN
        ratio_max: largest ratio of a token, without NaN
        n_outside: number of tokens outside the band
        n_removed: number of tokens with a recorded clip_* flag
        word_outside: whether the word's ratio is outside the band
        word_outside_scaled: whether the word's ratio is outside [(1 - low)^n, (1 + high)^n], which needs an outside
            token
    """
    names = ["iteration", "sequence", "position", "word_id", "is_special"]
    anchored = token_table[names].assign(anchor=anchor_logprobs.to_numpy(np.float64))
    rows = updates[updates["clip_flag"].notna()].merge(anchored, on=names[:3], validate="many_to_one")
    log_ratio = rows["new_logprobs"].astype(np.float64) - rows["anchor"]
    ratio = ratios_of(log_ratio.to_numpy())
    rows = rows.assign(
        n_tokens=1,
        log_ratio=log_ratio,
        ratio_max=ratio,
        n_outside=is_outside(ratio, rule),
        n_removed=recorded_clipped(rows["clip_flag"]),
        n_nan=log_ratio.isna(),
    )
    keys = ["iteration", "epoch", "sequence", "word_id", "is_special"]
    words = rows.groupby(keys, as_index=False).agg(
        **{name: (name, "sum") for name in ("n_tokens", "log_ratio", "n_outside", "n_removed", "n_nan")},
        ratio_max=("ratio_max", "max"),
    )
    words["log_ratio"] = words["log_ratio"].mask(words.pop("n_nan") > 0)  # the sum leaves out NaN
    total = words["log_ratio"].to_numpy()
    words["word_outside"] = is_outside(ratios_of(total), rule)
    # r < (1 - low)^n is r^(1/n) < 1 - low
    words["word_outside_scaled"] = is_outside(ratios_of(total / words["n_tokens"].to_numpy()), rule)
    return words


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


def clip_table(words: pd.DataFrame) -> pd.DataFrame:
    """Return a `ClipBand` per iteration and epoch, from the rows of `word_ratios`."""
    rows = []
    for _, tokens in words.groupby(["iteration", "epoch"], sort=True):
        of_text = tokens[~tokens["is_special"]].assign(n_words=1)
        rows.append(
            ClipBand(
                int(tokens["iteration"].iloc[0]),
                int(tokens["epoch"].iloc[0]),
                int(tokens["n_tokens"].sum()),
                len(of_text),
                *_share(tokens, "n_outside", "n_tokens"),
                *_share(tokens, "n_removed", "n_tokens"),
                *_share(of_text, "word_outside", "n_words"),
                *_share(of_text, "word_outside_scaled", "n_words"),
                tokens["ratio_max"].max(),
                np.exp(of_text["log_ratio"].max()),
            )
        )
    return pd.DataFrame(rows, columns=ClipBand._fields)


def _share(frame: pd.DataFrame, count: str, unit: str) -> Ratio:
    sums = frame.groupby("sequence")[[count, unit]].sum()
    return ratio_of_sums(sums[count].to_numpy(np.float64), sums[unit].to_numpy(np.float64))
