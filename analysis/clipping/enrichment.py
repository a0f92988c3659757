"""What kind of tokens are clipped: their probability and entropy, and whether they stay clipped."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.flags import token_flags
from analysis.clipping.update_rows import Bool, Float64, IterationRows, column, policy_rows

FORK_SHARE = 0.2  # the most uncertain fifth of tokens, "forks" (Wang et al., 2025)


def auroc(scores: Float64, positive: Bool) -> float:
    """P(score of a positive > score of a negative), ties half; NaN without both kinds. Mann and Whitney, 1947."""
    n_positive = int(positive.sum())
    n_negative = len(positive) - n_positive
    if not n_positive or not n_negative:
        return float("nan")
    ranks = pd.Series(scores).rank(method="average").to_numpy()
    return float((ranks[positive].sum() - n_positive * (n_positive + 1) / 2.0) / (n_positive * n_negative))


def jaccard(a: Bool, b: Bool) -> float:
    """|a and b| / |a or b|; NaN where both are empty."""
    union = int((a | b).sum())
    return int((a & b).sum()) / union if union else float("nan")


def _mean(values: Float64) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _median(values: Float64) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def clip_enrichment(item: IterationRows) -> pd.DataFrame:
    """One row per epoch: which tokens are clipped. Entropies and probabilities are those before the update.

    auroc_entropy and jaccard_forks compare clip_high with the entropy and with the most uncertain fifth of the
    epoch's tokens. stays_clipped: share of the tokens clipped here that are clipped in every later epoch too; NaN in
    the last epoch. Means and medians over no token are NaN.
    """
    rows = policy_rows(item).reset_index(drop=True)
    flags = token_flags(rows, item.rule)
    epochs = sorted(rows["epoch"].unique())
    cut = pd.Series(flags["grad_zero"].to_numpy(bool), index=pd.MultiIndex.from_frame(rows[["sequence", "position"]]))
    table = []
    for number, epoch in enumerate(epochs):
        here = rows["epoch"].to_numpy() == epoch
        up, down = (flags[name].to_numpy(bool)[here] for name in ("clip_high", "clip_low"))
        clipped = flags["grad_zero"].to_numpy(bool)[here]
        probability = np.exp(column(rows, "anchor_logprobs")[here])
        entropy = column(rows, "entropies")[here]
        forks = entropy >= np.quantile(entropy, 1.0 - FORK_SHARE)
        stays = float("nan")
        later = rows["epoch"].to_numpy() > epoch
        if number + 1 < len(epochs) and clipped.any():
            always = cut[later].groupby(level=[0, 1]).all()
            stays = float(always.reindex(cut[here][clipped].index).dropna().astype(bool).mean())
        table.append(
            {
                "iteration": item.iteration,
                "epoch": epoch,
                "n_tok": int(here.sum()),
                "n_clip_high": int(up.sum()),
                "n_clip_low": int(down.sum()),
                "mean_p_clip_high": _mean(probability[up]),
                "mean_p_clip_low": _mean(probability[down]),
                "mean_p": _mean(probability),
                "median_entropy_clipped": _median(entropy[clipped]),
                "median_entropy_unclipped": _median(entropy[~clipped]),
                "auroc_entropy": auroc(entropy, up),
                "jaccard_forks": jaccard(up, forks),
                "stays_clipped": stays,
            }
        )
    return pd.DataFrame(table)


def clip_vocab(item: IterationRows) -> pd.DataFrame:
    """Sums per token id, for `merged_vocab`: rows of policy steps, clipped up and down, entropies; and its text."""
    rows = policy_rows(item)
    flags = token_flags(rows, item.rule)
    ones = pd.DataFrame(
        {
            "token_id": rows["token_id"],
            "n": 1,
            "n_clip_high": flags["clip_high"].astype(np.int64),
            "n_clip_low": flags["clip_low"].astype(np.int64),
            "n_grad_zero": flags["grad_zero"].astype(np.int64),
            "entropy_sum": rows["entropies"].astype(np.float64),
        }
    )
    counts = ones.groupby("token_id", as_index=False).sum()
    first = item.tokens.drop_duplicates("token_id")[["token_id", "sequence", "char_start", "char_end"]]
    named = first.merge(item.sequences[["sequence", "response"]], on="sequence", validate="many_to_one")
    spans = zip(named["response"], named["char_start"], named["char_end"], strict=True)
    named["text"] = [response[start:end] for response, start, end in spans]
    return counts.merge(named[["token_id", "text"]], on="token_id", validate="one_to_one")


def merged_vocab(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """`clip_vocab` of many iterations: sums, rate, lift over all tokens, mean entropy; most clipped first.

    The text is that of the token's first occurrence: single bytes of a character have none without their neighbours.
    """
    together = pd.concat(tables, ignore_index=True)
    sums = together.drop(columns="text").groupby("token_id", as_index=False).sum()
    texts = together.drop_duplicates("token_id")[["token_id", "text"]]
    total = sums["n_grad_zero"].sum() / sums["n"].sum()
    sums["rate"] = sums["n_grad_zero"] / sums["n"]
    sums["lift"] = sums["rate"] / (total or float("nan"))
    sums["mean_entropy"] = sums.pop("entropy_sum") / sums["n"]
    ordered = sums.merge(texts, on="token_id").sort_values(["n_grad_zero", "token_id"], ascending=[False, True])
    return ordered.reset_index(drop=True)
