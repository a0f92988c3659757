"""The clip band for words: what does a band for the ratios of tokens imply for the ratio of a word?

The ratio of a word is the product of those of its tokens. So a band [1 - low, 1 + high] for tokens bounds a word of n
tokens only by [(1 - low)^n, (1 + high)^n], and the share of tokens outside the band depends on the tokenizer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.tokenization.kl import sums
from analysis.tokenization.summary import ratio_of_sums
from ppo_repro.errors import UserError

Floats = npt.NDArray[np.float64]
UPDATE_COLUMNS = ["iteration", "epoch", "minibatch", "sequence", "position", "new_logprobs", "clip_flag"]


def word_ratios(
    token_table: pd.DataFrame,
    anchor_logprobs: pd.Series,
    updates: pd.DataFrame,
    *,
    clip_low: float,
    clip_high: float,
) -> pd.DataFrame:
    """One row per word and epoch of one iteration: log-ratio, and how much of the word is outside the band.

    `token_table` is that of `analysis.tokenization.kl`, `anchor_logprobs` [N] the denominator of the run's ratio,
    `updates` has UPDATE_COLUMNS; rows where the policy took no step (null) are left out. Ratios are exp(new - anchor)
    in float64, compared strictly. `word_out`: the word's ratio is outside [1 - low, 1 + high]; `word_out_scaled`:
    outside [(1 - low)^n, (1 + high)^n], which requires a token outside. `n_clipped` counts recorded clip_* flags.
    UserError unless 0 < clip_low < 1 and clip_high > 0.
    """
    if not (0.0 < clip_low < 1.0 and clip_high > 0.0):
        raise UserError(
            f"clip band = {clip_low}, {clip_high}: the lower must be in (0, 1), the upper above 0; use the run's"
        )
    first = np.flatnonzero(token_table["position"].to_numpy() == 0)
    stepped = updates[updates["new_logprobs"].notna()].sort_values(["epoch", "sequence", "position"], kind="stable")
    rows = first[stepped["sequence"].to_numpy(np.int64)] + stepped["position"].to_numpy(np.int64)
    log_ratio = stepped["new_logprobs"].to_numpy(np.float64) - anchor_logprobs.to_numpy(np.float64)[rows]
    keys = pd.DataFrame({"iteration": stepped["iteration"].to_numpy(), "epoch": stepped["epoch"].to_numpy()})
    for name in ("sequence", "word_id", "is_special"):
        keys[name] = token_table[name].to_numpy()[rows]
    changed = (keys[["epoch", "sequence", "word_id"]].diff() != 0).any(axis=1).to_numpy(bool)
    starts = np.flatnonzero(changed)
    words = keys.iloc[starts].reset_index(drop=True)
    words["n_tok"] = np.diff(np.append(starts, len(keys)))
    words["log_ratio"] = sums(log_ratio, starts)
    words["max_token_ratio"] = np.exp(np.maximum.reduceat(log_ratio, starts)) if len(starts) else np.zeros(0)
    words["n_out"] = sums(_outside(log_ratio, clip_low, clip_high).astype(np.float64), starts).astype(np.int64)
    clipped = np.asarray(stepped["clip_flag"].str.startswith("clip_"), dtype=np.float64)
    words["n_clipped"] = sums(clipped, starts).astype(np.int64)
    total, n = words["log_ratio"].to_numpy(), words["n_tok"].to_numpy(np.float64)
    words["word_out"] = _outside(total, clip_low, clip_high)
    # in logarithms, where (1 + high)^n cannot overflow
    words["word_out_scaled"] = (total < n * np.log1p(-clip_low)) | (total > n * np.log1p(clip_high))
    return words


def clip_table(words: pd.DataFrame) -> pd.DataFrame:
    """`tok_clip`: per iteration and epoch the shares of tokens and words outside the band, se clustered by response.

    token_out, token_clipped: per token, special ones included. word_out, word_out_scaled: per word of text.
    max_token_ratio, max_word_ratio: the largest ratios.
    """
    rows = []
    for (iteration, epoch), group in words.groupby(["iteration", "epoch"], sort=True):
        of_text = group[~group["is_special"].to_numpy(bool)]
        row: dict[str, object] = {"iteration": iteration, "epoch": epoch, "n_tok": int(group["n_tok"].sum())}
        row["n_word"] = len(of_text)
        for label, frame, count, unit in (
            ("token_out", group, "n_out", "n_tok"),
            ("token_clipped", group, "n_clipped", "n_tok"),
            ("word_out", of_text, "word_out", None),
            ("word_out_scaled", of_text, "word_out_scaled", None),
        ):
            row[label], row[f"{label}_se"] = _share(frame, count, unit)
        row["max_token_ratio"] = float(group["max_token_ratio"].max())
        row["max_word_ratio"] = float(np.exp(of_text["log_ratio"].max())) if len(of_text) else float("nan")
        rows.append(row)
    return pd.DataFrame(rows)


def _outside(log_ratio: Floats, low: float, high: float) -> npt.NDArray[np.bool_]:
    ratio = np.exp(log_ratio)
    return (ratio < 1.0 - low) | (ratio > 1.0 + high)


def _share(frame: pd.DataFrame, count: str, unit: str | None) -> tuple[float, float]:
    y = frame[count].to_numpy(np.float64)
    x = frame[unit].to_numpy(np.float64) if unit else np.ones(len(frame))
    if not len(frame):
        return float("nan"), float("nan")
    return ratio_of_sums(y, x, np.unique(frame["sequence"], return_inverse=True)[1].astype(np.int64))
