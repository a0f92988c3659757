"""How far apart are two log-probs of the same token? Sums over tokens by response, and the metrics from the sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis import clusters
from ppo_repro.analysis.clusters import Floats, Ratio
from ppo_repro.analysis.pairs import NO_TOKEN
from ppo_repro.base.errors import UserError
from ppo_repro.statistics.bits import has_steps
from ppo_repro.statistics.kl import k1, k3

# token means with a standard error clustered by response
TOKEN_MEANS = ("frac_bitwise_equal", "abs_mean", "prob_abs_mean", "k1", "k3", "kl_pg_nonneg", "tv", "rho_mean")


class Estimate(NamedTuple):
    """A metric by one reduction: a row of `update_table`."""

    metric: str
    reduction: str
    value: float
    se: float = math.nan  # NaN: the reduction has none


@dataclass(frozen=True)
class Sums:
    """Sums over tokens: one row per response, and the counts of |delta| and of ULPs in each bin of `log_bins`.

    Columns of `sequences`: length, finite (tokens with two finite log-probs), diverged (whether any bit differs), and
    over the finite tokens the sums, smallest and largest values.
    """

    sequences: pd.DataFrame
    abs_counts: pd.Series
    ulp_counts: pd.Series
    masked: int


def sums_of(tokens: pd.DataFrame, masked: int = 0) -> Sums:
    """Sum `with_mismatch` rows of whole responses; `masked` counts the tokens that a mask removed before."""
    starts = clusters.sequence_starts(tokens)
    finite = tokens["finite"].to_numpy()
    a, b = (tokens[name].to_numpy().astype(np.float64) for name in ("logprobs_a", "logprobs_b"))
    rows = {
        "length": np.diff(np.append(starts, len(tokens))),
        "finite": clusters.segment_sums(finite.astype(float), starts),
    }
    rows["diverged"] = clusters.segment_sums((~tokens["bitwise_equal"].to_numpy()).astype(float), starts) > 0
    for name, values in quantities(tokens).items():
        rows[name] = clusters.segment_sums(np.where(finite, values, 0.0), starts)
    large = finite & has_steps(a, b)
    ulp = tokens["ulp"].to_numpy().astype(np.float64)
    for name, values, where in (
        ("rho", tokens["rho"].to_numpy(), finite),
        ("abs", tokens["abs_delta"].to_numpy(), finite),
        ("prob", np.abs(tokens["prob_diff"].to_numpy()), finite),
        ("ulp", ulp, large),
    ):
        for side, ufunc, nothing in (("min", np.minimum, math.inf), ("max", np.maximum, -math.inf)):
            chosen = np.where(where, values, nothing)
            rows[f"{name}_{side}"] = ufunc.reduceat(chosen, starts) if len(starts) else np.zeros(0)
    return Sums(pd.DataFrame(rows), _binned(tokens["abs_delta"].to_numpy()[finite]), _binned(ulp[large]), masked)


def quantities(tokens: pd.DataFrame) -> dict[str, Floats]:
    """Return each quantity of `with_mismatch` rows whose mean is a metric, float64 [N], by the name of the metric.

    x = rho - 1 keeps digits that rho would lose near 1.
    """
    delta, rho, prob_diff = (tokens[name].to_numpy() for name in ("delta", "rho", "prob_diff"))
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.expm1(delta)
        return {
            "frac_bitwise_equal": tokens["bitwise_equal"].to_numpy().astype(np.float64),
            "abs_mean": tokens["abs_delta"].to_numpy(),
            "prob_abs_mean": np.abs(prob_diff),
            "k1": k1(delta),
            "k3": tokens["k3"].to_numpy(),
            # rho delta - (rho - 1) in a form that is never negative
            "kl_pg_nonneg": rho * k3(-delta),
            "tv": 0.5 * np.abs(x),
            "x": x,
            "x_sq": x * x,
        }


def _binned(values: Floats) -> pd.Series:
    return pd.Series(clusters.log_bins(values)).value_counts().sort_index()


def merged(parts: Sequence[Sums]) -> Sums:
    """Return the sums over the responses of all parts. Raises UserError if there is no part."""
    if not parts:
        raise UserError(NO_TOKEN)
    counts = [
        pd.concat([getattr(part, name) for part in parts]).groupby(level=0).sum()
        for name in ("abs_counts", "ulp_counts")
    ]
    sequences = pd.concat([part.sequences for part in parts], ignore_index=True)
    return Sums(sequences, counts[0], counts[1], sum(part.masked for part in parts))


def update_table(sums: Sums) -> pd.DataFrame:
    """Return one row per metric and reduction: metric, reduction, value, se (float64), n_tokens, n_sequences (int64).

    With delta = logprobs_b - logprobs_a, rho = exp(delta) and tokens drawn from a, these estimates have no bias:

        KL(a || b): k1 = E[-delta] and k3 = E[rho - 1 - delta]
        KL(b || a): kl_pg_nonneg = E[rho delta - rho + 1]
        total variation: tv = E|rho - 1| / 2
        chi^2(b || a): chi2_seq = E[product of rho over a response, squared] - 1, which may be negative in a sample

    The effective sample size is ess_frac = 1 / (1 + Var(rho) / E[rho]^2). The reductions are

        token_mean: mean over tokens, with se
        seq_mean_token_sum, seq_mean: mean over responses of a sum, or of another number of the response, with se
        token, seq: moments, quantiles (relative error 2**-8) and extremes of tokens or responses, without se
        count: a number of tokens

    n_nonfinite counts tokens that are not finite. No metric includes these tokens; seq_mean and seq also leave out
    their responses.
    """
    responses = sums.sequences[sums.sequences["finite"] > 0]
    whole = sums.sequences[sums.sequences["finite"] == sums.sequences["length"]]
    rows = [*_means_over_tokens(responses), *_of_tokens(sums, responses), *_of_responses(whole), *_counts(sums)]
    table = pd.DataFrame(rows, columns=Estimate._fields)
    table["n_tokens"] = int(responses["finite"].sum())
    table["n_sequences"] = np.where(table["reduction"].isin(["seq_mean", "seq"]), len(whole), len(responses))
    return table


def _means_over_tokens(responses: pd.DataFrame) -> list[Estimate]:
    """Return the metrics that have a standard error clustered by response, from responses with a finite token."""
    n, rows = responses["finite"].to_numpy(), list[Estimate]()
    for metric in TOKEN_MEANS:
        values = responses["x" if metric == "rho_mean" else metric].to_numpy()
        value, se = clusters.ratio_of_sums(values, n)
        rows.append(Estimate(metric, "token_mean", 1.0 + value if metric == "rho_mean" else value, se))
    return [*rows, Estimate("k3", "seq_mean_token_sum", *clusters.mean(responses["k3"].to_numpy()))]


def _of_tokens(sums: Sums, responses: pd.DataFrame) -> list[Estimate]:
    """Return effective sample size, extremes and quantiles of tokens, from responses with a finite token."""
    seq, n = sums.sequences, responses["finite"].to_numpy()
    _, ess = weight_moments(*(clusters.ratio_of_sums(responses[name].to_numpy(), n) for name in ("x", "x_sq")))
    largest = {name: _largest(seq[f"{name}_max"]) for name in ("abs", "prob", "ulp", "rho")}
    values = {
        "ess_frac": ess, "rho_max": largest["rho"],
        "rho_min": -_largest(-seq["rho_min"]), "abs_max": largest["abs"], "prob_abs_max": largest["prob"],
        "ulp_max": largest["ulp"],
        # the middle of the last bin may lie above the largest value; below 256 every integer has a bin of its own
        "abs_p99": min(clusters.quantile(sums.abs_counts, 0.99), largest["abs"]),
        "ulp_p99": float(np.floor(clusters.quantile(sums.ulp_counts, 0.99))),
    }  # fmt: skip
    return [Estimate(metric, "token", value) for metric, value in values.items()]


def _of_responses(whole: pd.DataFrame) -> list[Estimate]:
    """Return the metrics of whole responses, from responses whose tokens are all finite."""
    log_rho = -whole["k1"].to_numpy()
    with np.errstate(over="ignore"):
        x = np.expm1(log_rho)
        chi2, ess = weight_moments(clusters.mean(x), clusters.mean(x**2))
    return [
        Estimate("log_ppl_abs_diff", "seq_mean", *clusters.mean(np.abs(log_rho) / whole["length"])),
        Estimate("chi2_seq", "seq", chi2),
        Estimate("ess_seq", "seq", ess),
        Estimate("frac_diverged", "seq", clusters.mean(whole["diverged"].to_numpy(float)).value),
    ]


def _counts(sums: Sums) -> list[Estimate]:
    length, finite = sums.sequences["length"].sum(), sums.sequences["finite"].sum()
    counts = {"n_tokens": length, "n_masked": sums.masked, "n_nonfinite": length - finite}
    return [Estimate(metric, "count", float(count)) for metric, count in counts.items()]


def _largest(values: pd.Series) -> float:
    """Return the largest value; NaN without a value."""
    largest = float(values.max()) if len(values) else -math.inf
    return math.nan if largest == -math.inf else largest


def weight_moments(x: Ratio, x_sq: Ratio) -> tuple[float, float]:
    """Return chi2 = E[w^2] - 1 and ESS / N = 1 / (1 + Var(w) / E[w]^2) of w = 1 + x, from the means of x and x^2.

    ESS / N is NaN if a square is beyond float64.
    """
    if not math.isfinite(x_sq.value) or x.value <= -1.0:
        return 2.0 * x.value + x_sq.value, math.nan
    # rounding may make a variance of zero negative
    variance = max(x_sq.value - x.value**2, 0.0)
    return 2.0 * x.value + x_sq.value, 1.0 / (1.0 + variance / (1.0 + x.value) ** 2)
