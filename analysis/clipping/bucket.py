"""Table `clip_bucket`: which tokens are clipped, compared with what chance alone would clip."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.clipping.flags import DISJOINT, token_flags
from analysis.clipping.step import share
from analysis.clipping.update_rows import Bool, ClipRule, Float64, IterationRows, column, policy_rows
from analysis.clipping.weights import logit_step, masses
from ppo_repro.config.run import RunConfig

Codes = npt.NDArray[np.int64]
P_EDGES = np.array([0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.9, 0.99, 1.0])
RATES = ("band_out", "grad_zero", *DISJOINT)
Z_95 = 1.959963984540054


def eligible(probabilities: Float64, advantages: Float64, rule: ClipRule) -> tuple[Bool, Bool]:
    """Tokens that could be in clip_high, and tokens that could be in clip_low.

    p_new <= 1, so a ratio above 1 + high needs p_anchor < 1 / (1 + high); any probability can fall.
    """
    return (advantages > 0) & (probabilities < 1.0 / (1.0 + rule.high)), advantages < 0


def expected_among_eligible(codes: Codes, n_bins: int, cut: Bool, groups: tuple[Bool, Bool]) -> Float64:
    """Clipped tokens expected per bin if chance alone decided within each group of eligible tokens, float64."""
    expected = np.zeros(n_bins)
    for group in groups:
        size = int(group.sum())
        if size:
            rate = int((cut & group).sum()) / size
            expected += rate * np.bincount(codes[group], minlength=n_bins)
    return expected


def step_needed(probabilities: Float64, prob_sq_sums: Float64, advantages: Float64, rule: ClipRule) -> Float64:
    """The smallest eta > 0 at which a pure step eta A (e_a - pi) in the logits clips the token; inf if none, float64.

    To first order the step adds eta A (1 - 2 p + sum pi^2) to the log-prob, so rare tokens move further.
    """
    bound = np.where(advantages > 0, np.log1p(rule.high), -np.log1p(-rule.low))
    speed = np.abs(advantages) * logit_step(probabilities, prob_sq_sums)
    with np.errstate(divide="ignore"):
        return np.where(speed > 0, bound / speed, np.inf)


def expected_from_logit_step(codes: Codes, n_bins: int, needed: Float64, clipped: int) -> Float64:
    """Clipped tokens per bin if one step of equal size for all tokens clipped as many as were clipped, float64.

    That size is the `clipped`-th smallest of `needed`; tokens tied with it count as clipped.
    """
    if clipped == 0:
        return np.zeros(n_bins)
    size = np.partition(needed, clipped - 1)[clipped - 1]
    reached = (needed <= size) & np.isfinite(needed)
    return np.bincount(codes[reached], minlength=n_bins).astype(np.float64)


def lift_interval(codes: Codes, n_bins: int, sequences: Codes, cut: Bool) -> tuple[Float64, Float64, Float64]:
    """Lift P(cut | bin) / P(cut) and its 95 % limits, float64; NaN where a bin has no token or no clipped one.

    The limits are exp(log lift -+ 1.96 SE). SE is linearised over whole responses, since tokens of a response are not
    independent: SE^2 = sum_s (c_bs / c_b - n_bs / n_b - c_s / C + n_s / N)^2.
    """
    total = int(sequences.max()) + 1 if len(sequences) else 0
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


def _within(values: Float64, edges: Float64) -> tuple[Codes, Float64, Float64]:
    """The bin [lo, hi) of each value, the last bin closed, and the lower and upper limits of the bins."""
    inner = edges[1:-1]
    return np.searchsorted(inner, values, side="right").astype(np.int64), edges[:-1], edges[1:]


def _quantile_edges(values: Float64, count: int) -> Float64:
    """Edges of `count` quantile bins; fewer where values are tied; two equal edges where all values are equal."""
    edges = np.unique(np.quantile(values, np.linspace(0.0, 1.0, count + 1)))
    return edges if len(edges) > 1 else np.repeat(edges, 2)


def _position_edges(longest: int) -> Float64:
    """0, 1, 2, 4, 8, ... until beyond the last position."""
    powers = 2.0 ** np.arange(0, max(1, int(np.ceil(np.log2(longest + 1.0)))) + 1)
    return np.concatenate([[0.0], powers])


def buckets(rows: pd.DataFrame, tokens: pd.DataFrame) -> dict[str, tuple[Codes, Float64, Float64]]:
    """kind -> (bin of each row, lower limits, upper limits). Quantiles are those of the iteration's tokens."""
    by_count: dict[str, tuple[Codes, Float64, Float64]] = {}
    for name in ("epoch", "minibatch"):
        values = rows[name].to_numpy(np.int64)
        limits = np.arange(values.max() + 1, dtype=np.float64)
        by_count[name] = (values, limits, limits + 1.0)
    positions = column(rows, "position")
    return {
        "p_anchor": _within(np.exp(column(rows, "anchor_logprobs")), P_EDGES),
        "entropy_decile": _within(column(rows, "entropies"), _quantile_edges(column(tokens, "entropies"), 10)),
        "adv_quartile": _within(
            np.abs(column(rows, "advantages")), _quantile_edges(np.abs(column(tokens, "advantages")), 4)
        ),
        "position": _within(positions, _position_edges(int(positions.max()))),
        **by_count,
    }


def _kind_table(
    rows: pd.DataFrame, flags: pd.DataFrame, bins: tuple[Codes, Float64, Float64], rule: ClipRule
) -> pd.DataFrame:
    """The bins of one kind for one sign of the advantage."""
    codes, lower, upper = bins
    count = len(lower)
    n = np.bincount(codes, minlength=count).astype(np.float64)
    advantages, probabilities = column(rows, "advantages"), np.exp(column(rows, "anchor_logprobs"))
    cut = flags["grad_zero"].to_numpy(bool)
    groups = eligible(probabilities, advantages, rule)
    by_chance = expected_among_eligible(codes, count, cut, groups)
    needed = step_needed(probabilities, column(rows, "prob_sq_sums"), advantages, rule)
    by_step = expected_from_logit_step(codes, count, needed, int(cut.sum()))
    lift, low, high = lift_interval(codes, count, rows["sequence"].to_numpy(np.int64), cut)
    clipped = np.bincount(codes[cut], minlength=count)
    mass = column(flags, "surrogate_mass")
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = {name: np.bincount(codes, flags[name], minlength=count) / n for name in RATES}
        return pd.DataFrame(
            {
                **{"lo": lower, "hi": upper, "n": n.astype(np.int64), "n_grad_zero": clipped},
                **numbers,
                **{"lift": lift, "ci_lo": low, "ci_hi": high},
                "lift_eligible": np.where(by_chance > 0, clipped / by_chance, np.nan),
                "lift_logit_step": np.where(by_step > 0, clipped / by_step, np.nan),
                "mean_log_ratio": np.bincount(codes, column(rows, "log_ratios"), minlength=count) / n,
                "gm_share": np.bincount(codes, mass, minlength=count) / (mass.sum() or np.nan),
                "gm_clip": [share(mass[codes == b], cut[codes == b]) for b in range(count)],
            }
        )


def clip_bucket(item: IterationRows, config: RunConfig) -> pd.DataFrame:
    """Rates per bin of p_anchor, entropy decile, |advantage| quartile, position, epoch and minibatch, and adv_sign.

    Over all policy steps of the iteration; adv_sign is all, pos or neg. lift: rate of grad_zero in the bin over
    that of all bins, with 95 % limits over whole responses. lift_eligible: clipped tokens over those expected if chance
    picked among the tokens that can be clipped at all (`eligible`). lift_logit_step: the same for one step of equal
    size in the logits (`step_needed`). gm_share: share of the surrogate mass; gm_clip: share of the bin's mass removed.
    """
    rows = policy_rows(item).reset_index(drop=True)
    flags = token_flags(rows, item.rule).join(masses(rows, config, item.tokens))
    advantages = column(rows, "advantages")
    scopes = {"all": np.ones(len(rows), dtype=bool), "pos": advantages > 0, "neg": advantages < 0}
    frames = []
    for kind, (codes, lower, upper) in buckets(rows, item.tokens).items():
        for sign, where in scopes.items():
            table = _kind_table(rows[where], flags[where], (codes[where], lower, upper), item.rule)
            frames.append(table.assign(iteration=item.iteration, kind=kind, adv_sign=sign))
    result = pd.concat(frames, ignore_index=True)
    first = ["iteration", "kind", "adv_sign"]
    return result[[*first, *(name for name in result.columns if name not in first)]]
