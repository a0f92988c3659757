"""Tables `clip_bucket` and `clip_vocab`: which tokens are clipped more than others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.clipping.flags import FLAGS, token_flags
from analysis.clipping.update_rows import Bool, ClipRule, Float64, IterationRows, column, policy_rows

Codes = npt.NDArray[np.int64]
P_EDGES = np.array([0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.9, 0.99, 1.0])
Z_95 = 1.959963984540054


def expected_by_chance(
    codes: Codes, n_bins: int, cut: Bool, probabilities: Float64, advantages: Float64, rule: ClipRule
) -> Float64:
    """Clipped tokens expected per bin if chance alone chose them among the tokens that can be clipped, float64.

    Two groups can be: A > 0 and p_anchor < 1 / (1 + high), because p_new <= 1; and A < 0, for any probability can fall.
    """
    expected = np.zeros(n_bins)
    for group in ((advantages > 0) & (probabilities < 1.0 / (1.0 + rule.high)), advantages < 0):
        if group.any():
            expected += (cut & group).sum() / group.sum() * np.bincount(codes[group], minlength=n_bins)
    return expected


def lift_interval(codes: Codes, n_bins: int, sequences: Codes, cut: Bool) -> tuple[Float64, Float64, Float64]:
    """Lift P(cut | bin) / P(cut) and its 95 % limits, float64; NaN where a bin has no token or no clipped one.

    The limits are exp(log lift -+ 1.96 SE). SE is linearised over whole responses, since tokens of a response are not
    independent: SE^2 = sum_s (c_bs / c_b - n_bs / n_b - c_s / C + n_s / N)^2.
    """
    total = int(sequences.max(initial=-1)) + 1
    cell = codes * total + sequences
    tokens = np.bincount(cell, minlength=n_bins * total).reshape(n_bins, total).astype(np.float64)
    clipped = np.bincount(cell[cut], minlength=n_bins * total).reshape(n_bins, total).astype(np.float64)
    n, c = tokens.sum(axis=1), clipped.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        lift = (c / n) / (c.sum() / n.sum())
        influence = clipped / c[:, None] - tokens / n[:, None]
        influence += tokens.sum(axis=0) / n.sum() - clipped.sum(axis=0) / c.sum()
        error = np.sqrt((influence**2).sum(axis=1))
        usable = (n > 0) & (c > 0)
        low, high = lift * np.exp(-Z_95 * error), lift * np.exp(Z_95 * error)
    return np.where(n > 0, lift, np.nan), np.where(usable, low, np.nan), np.where(usable, high, np.nan)


def buckets(rows: pd.DataFrame, tokens: pd.DataFrame) -> dict[str, tuple[Codes, Float64]]:
    """kind -> (bin [lo, hi) of each row, the last one closed; edges). Quantiles are those of the iteration's tokens."""

    def quantiles(values: Float64, count: int) -> Float64:
        edges = np.unique(np.quantile(values, np.linspace(0.0, 1.0, count + 1)))
        return edges if len(edges) > 1 else np.repeat(edges, 2)

    longest = float(rows["position"].max())
    by_kind = {
        "p_anchor": (np.exp(column(rows, "anchor_logprobs")), P_EDGES),
        "entropy_decile": (column(rows, "entropies"), quantiles(column(tokens, "entropies"), 10)),
        "adv_quartile": (np.abs(column(rows, "advantages")), quantiles(np.abs(column(tokens, "advantages")), 4)),
        "position": (column(rows, "position"), np.array([0.0, *2.0 ** np.arange(np.ceil(np.log2(longest + 1)) + 1)])),
        **{name: (column(rows, name), np.arange(rows[name].max() + 2.0)) for name in ("epoch", "minibatch")},
    }
    return {k: (np.searchsorted(edges[1:-1], values, side="right"), edges) for k, (values, edges) in by_kind.items()}


def clip_bucket(item: IterationRows) -> pd.DataFrame:
    """Rates per bin of p_anchor, entropy decile, |advantage| quartile, position, epoch and minibatch, and adv_sign.

    Over all policy steps of the iteration; adv_sign is all, pos or neg. Columns lo, hi, n, n_grad_zero; rates of FLAGS;
    lift: rate of grad_zero in the bin over that of all bins, with 95 % limits ci_lo, ci_hi over whole
    responses; lift_eligible: clipped tokens over `expected_by_chance`.
    """
    rows = policy_rows(item).reset_index(drop=True)
    flags = token_flags(rows, item.rule)
    advantages, probabilities = column(rows, "advantages"), np.exp(column(rows, "anchor_logprobs"))
    scopes = {"all": np.ones(len(rows), dtype=bool), "pos": advantages > 0, "neg": advantages < 0}
    sequences, frames = rows["sequence"].to_numpy(np.int64), []
    for kind, (codes_of_all, edges) in buckets(rows, item.tokens).items():
        for sign, where in scopes.items():
            codes, count, cut = codes_of_all[where], len(edges) - 1, flags["grad_zero"].to_numpy(bool)[where]
            n, clipped = np.bincount(codes, minlength=count), np.bincount(codes[cut], minlength=count)
            expected = expected_by_chance(codes, count, cut, probabilities[where], advantages[where], item.rule)
            lift, low, high = lift_interval(codes, count, sequences[where], cut)
            with np.errstate(divide="ignore", invalid="ignore"):
                rates = {name: np.bincount(codes, flags[name][where], minlength=count) / n for name in FLAGS}
                eligible = np.where(expected > 0, clipped / expected, np.nan)
            key = {"iteration": item.iteration, "kind": kind, "adv_sign": sign, "lo": edges[:-1], "hi": edges[1:]}
            numbers = {**rates, "lift": lift, "ci_lo": low, "ci_hi": high, "lift_eligible": eligible}
            frames.append(pd.DataFrame({**key, "n": n, "n_grad_zero": clipped, **numbers}))
    return pd.concat(frames, ignore_index=True)


def clip_vocab(item: IterationRows) -> pd.DataFrame:
    """Counts per token id, for `merged_vocab`: rows of policy steps, clipped up and down; and its text."""
    rows = policy_rows(item)
    flags = token_flags(rows, item.rule)
    ones = pd.DataFrame({"token_id": rows["token_id"], "n": 1})
    for name in ("clip_high", "clip_low", "grad_zero"):
        ones[f"n_{name}"] = flags[name].astype(np.int64)
    counts = ones.groupby("token_id", as_index=False).sum()
    first = item.tokens.drop_duplicates("token_id")[["token_id", "sequence", "char_start", "char_end"]]
    named = first.merge(item.sequences[["sequence", "response"]], on="sequence", validate="many_to_one")
    spans = zip(named["response"], named["char_start"], named["char_end"], strict=True)
    named["text"] = [response[start:end] for response, start, end in spans]
    return counts.merge(named[["token_id", "text"]], on="token_id", validate="one_to_one")


def merged_vocab(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """`clip_vocab` of many iterations: sums, rate of grad_zero, lift over all tokens; most clipped first.

    The text is that of the token's first occurrence: single bytes of a character have none without their neighbours.
    """
    together = pd.concat(tables, ignore_index=True)
    sums = together.drop(columns="text").groupby("token_id", as_index=False).sum()
    sums["rate"] = sums["n_grad_zero"] / sums["n"]
    sums["lift"] = sums["rate"] / (sums["n_grad_zero"].sum() / sums["n"].sum() or np.nan)
    texts = together.drop_duplicates("token_id")[["token_id", "text"]]
    ordered = sums.merge(texts, on="token_id").sort_values(["n_grad_zero", "token_id"], ascending=[False, True])
    return ordered.reset_index(drop=True)
