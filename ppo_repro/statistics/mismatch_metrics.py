"""Measure how far apart two log-probs of a token are: quantities of the token, sums by response, and METRICS.

Side `a` sampled the token or came first, side `b` is compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.statistics import clusters
from ppo_repro.statistics.bits import has_steps, ulp_distance, unequal_bits
from ppo_repro.statistics.clusters import Floats, Ratio
from ppo_repro.statistics.kl import k1, k3

# columns of `with_mismatch` whose sums the metrics need
SUMMED = ("bitwise_equal", "abs_delta", "prob_abs", "k1", "k3", "kl_pg_nonneg", "tv", "rho", "rho_sq")


def with_mismatch(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return pairs (`records.logprob_pairs`) with one more column for each quantity of a token's mismatch.

    float64: delta = logprobs_b - logprobs_a, nats; rho = exp(delta), infinite for delta > 709; and functions of both.
    If a log-prob is not finite, they follow IEEE arithmetic. The other columns are

        ulp: float32 steps between the log-probs, int64; -1 where they say nothing (`has_steps`)
        bitwise_equal: whether all bits agree
        finite: whether both log-probs are finite
    """
    a32, b32 = pairs["logprobs_a"].to_numpy(), pairs["logprobs_b"].to_numpy()
    a, b = a32.astype(np.float64), b32.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    # infinite and NaN values are marked by `finite`, or are ratios beyond float64
    with np.errstate(over="ignore", invalid="ignore"):
        delta = b - a
        rho = np.exp(delta)
        return pairs.assign(
            delta=delta,
            abs_delta=np.abs(delta),
            rho=rho,
            rho_sq=rho**2,
            prob_abs=np.abs(np.exp(b) - np.exp(a)),
            k1=k1(-delta),
            k3=k3(-delta),
            kl_pg_nonneg=rho * k3(delta),  # rho delta - (rho - 1) in a form that is never negative
            tv=0.5 * np.abs(np.expm1(delta)),  # expm1 keeps digits that rho - 1 would lose near 0
            ulp=np.where(finite & has_steps(a, b), ulp_distance(a32, b32), -1),
            bitwise_equal=~unequal_bits(a32, b32),
            finite=finite,
        )


@dataclass(frozen=True)
class MismatchSums:
    """Sums over tokens: one row per response, and the counts of |delta| and of ULPs in each bin of `log_bins`.

    Columns of `sequences`: length, finite (tokens with two finite log-probs), diverged (whether any bit differs); over
    the finite tokens the sums of SUMMED, and the extremes abs_max, prob_abs_max, ulp_max, rho_min and rho_max, which
    are NaN without a token.
    """

    sequences: pd.DataFrame
    abs_counts: pd.Series
    ulp_counts: pd.Series
    masked: int

    @cached_property
    def counted(self) -> pd.DataFrame:
        """Return the responses with a finite token."""
        return self.sequences[self.sequences["finite"] > 0]

    @cached_property
    def whole(self) -> pd.DataFrame:
        """Return the responses whose tokens are all finite."""
        return self.sequences[self.sequences["finite"] == self.sequences["length"]]


def mismatch_sums(tokens: pd.DataFrame, masked: int = 0) -> MismatchSums:
    """Sum `with_mismatch` rows of whole responses. `masked` counts the tokens that a mask removed before."""
    starts = clusters.sequence_starts(tokens)
    finite, has_ulps = tokens["finite"].to_numpy(), tokens["ulp"].to_numpy() >= 0

    def numbers(column: str) -> Floats:
        return tokens[column].to_numpy().astype(np.float64)

    def total(values: npt.NDArray[np.generic]) -> Floats:
        return clusters.segment_sums(values.astype(np.float64), starts)

    def extreme(ufunc: np.ufunc, column: str, where: npt.NDArray[np.bool_]) -> Floats:
        return ufunc.reduceat(np.where(where, numbers(column), math.nan), starts) if len(starts) else np.zeros(0)

    rows = {
        "length": np.diff(np.append(starts, len(tokens))),
        "finite": total(finite),
        "diverged": total(~tokens["bitwise_equal"].to_numpy()) > 0,
        **{name: total(np.where(finite, numbers(name), 0.0)) for name in SUMMED},
        "abs_max": extreme(np.fmax, "abs_delta", finite),
        "prob_abs_max": extreme(np.fmax, "prob_abs", finite),
        "ulp_max": extreme(np.fmax, "ulp", has_ulps),
        "rho_min": extreme(np.fmin, "rho", finite),
        "rho_max": extreme(np.fmax, "rho", finite),
    }
    abs_counts = clusters.bin_counts(numbers("abs_delta")[finite])
    return MismatchSums(pd.DataFrame(rows), abs_counts, clusters.bin_counts(numbers("ulp")[has_ulps]), masked)


def merged_sums(parts: Sequence[MismatchSums]) -> MismatchSums:
    """Return the sums over the responses of all parts, at least one."""

    def added(counts: Sequence[pd.Series]) -> pd.Series:
        return pd.concat(counts).groupby(level=0).sum()

    return MismatchSums(
        pd.concat([part.sequences for part in parts], ignore_index=True),
        added([part.abs_counts for part in parts]),
        added([part.ulp_counts for part in parts]),
        sum(part.masked for part in parts),
    )


Formula = Callable[[MismatchSums], Ratio]


@dataclass(frozen=True)
class Metric:
    """A metric by one reduction: a row of `metric_table`."""

    name: str
    reduction: str
    formula: Formula
    ideal: float | None  # the value of two equal sides
    meaning: str = ""


def _token_mean(column: str) -> Formula:
    """Return the formula of a mean over finite tokens, with a standard error clustered by response."""
    return lambda sums: clusters.ratio_of_sums(sums.counted[column].to_numpy(), sums.counted["finite"].to_numpy())


def _largest(column: str) -> Formula:
    """Return the formula of the largest value of the responses; NaN without a value."""
    return lambda sums: Ratio(float(sums.sequences[column].max()))


def _n_nonfinite(sums: MismatchSums) -> Ratio:
    return Ratio(float(sums.sequences["length"].sum() - sums.sequences["finite"].sum()))


def _frac_diverged(sums: MismatchSums) -> Ratio:
    return Ratio(clusters.mean(sums.whole["diverged"].to_numpy(float)).value)


def _ulp_p99(sums: MismatchSums) -> Ratio:
    # below 256 every integer has a bin of its own
    return Ratio(float(np.floor(clusters.quantile(sums.ulp_counts, 0.99))))


def _abs_p99(sums: MismatchSums) -> Ratio:
    # the middle of the last bin may lie above the largest value
    return Ratio(min(clusters.quantile(sums.abs_counts, 0.99), _largest("abs_max")(sums).value))


def _k3_of_responses(sums: MismatchSums) -> Ratio:
    return clusters.mean(sums.counted["k3"].to_numpy())


def _ess_frac(sums: MismatchSums) -> Ratio:
    weight, weight_sq, count = (clusters.exact_sum(sums.counted[name]) for name in ("rho", "rho_sq", "finite"))
    return Ratio(clusters.effective_share(weight, weight_sq, count))


def _ess_seq(sums: MismatchSums) -> Ratio:
    with np.errstate(over="ignore"):
        weights = np.exp(-sums.whole["k1"].to_numpy())
        sum_of_squares = clusters.exact_sum(weights**2)
    return Ratio(clusters.effective_share(clusters.exact_sum(weights), sum_of_squares, len(weights)))


def _chi2_seq(sums: MismatchSums) -> Ratio:
    with np.errstate(over="ignore"):
        return Ratio(clusters.mean(np.expm1(-2.0 * sums.whole["k1"].to_numpy())).value)


def _log_ppl_abs_diff(sums: MismatchSums) -> Ratio:
    return clusters.mean(np.abs(sums.whole["k1"].to_numpy()) / sums.whole["length"])


# a run records abs_max in float32 as max_abs_old_rollout (`statistics.bits.iteration_agreement`)
METRICS = (
    Metric("n_tokens", "count", lambda sums: Ratio(float(sums.sequences["length"].sum())), None, "tokens compared"),
    Metric("n_masked", "count", lambda sums: Ratio(float(sums.masked)), None, "tokens that a mask removed"),
    Metric("n_nonfinite", "count", _n_nonfinite, 0.0, "tokens with an infinite or NaN log-prob, left out below"),
    Metric("frac_bitwise_equal", "token_mean", _token_mean("bitwise_equal"), 1.0, "log-probs equal in every bit"),
    Metric("frac_diverged", "seq", _frac_diverged, 0.0, "responses with an unequal token"),
    Metric("ulp_p99", "token", _ulp_p99, 0.0, "float32 steps between the two, where |log-prob| > 0.01"),
    Metric("ulp_max", "token", _largest("ulp_max"), 0.0),
    Metric("abs_mean", "token_mean", _token_mean("abs_delta"), 0.0, "|delta|, nats; delta = b - a"),
    Metric("abs_p99", "token", _abs_p99, 0.0),
    Metric("abs_max", "token", _largest("abs_max"), 0.0),
    Metric("prob_abs_mean", "token_mean", _token_mean("prob_abs"), 0.0, "difference of probabilities"),
    Metric("prob_abs_max", "token", _largest("prob_abs_max"), 0.0),
    Metric("k1", "token_mean", _token_mean("k1"), 0.0, "KL(a || b), nats per token, signed estimator"),
    Metric("k3", "token_mean", _token_mean("k3"), 0.0, "KL(a || b), nats per token, never negative"),
    Metric("k3", "seq_mean_token_sum", _k3_of_responses, 0.0, "KL(a || b), nats per response"),
    Metric("kl_pg_nonneg", "token_mean", _token_mean("kl_pg_nonneg"), 0.0, "KL(b || a), nats per token"),
    Metric("tv", "token_mean", _token_mean("tv"), 0.0, "total variation"),
    Metric("rho_mean", "token_mean", _token_mean("rho"), 1.0, "mean of rho = exp(delta)"),
    Metric("rho_min", "token", lambda sums: Ratio(float(sums.sequences["rho_min"].min())), 1.0),
    Metric("rho_max", "token", _largest("rho_max"), 1.0),
    Metric("ess_frac", "token", _ess_frac, 1.0, "effective sample size of the weights rho, share of tokens"),
    Metric("ess_seq", "seq", _ess_seq, 1.0, "the same of products over responses, share of responses"),
    Metric("chi2_seq", "seq", _chi2_seq, 0.0, "chi-squared of products over responses"),
    Metric("log_ppl_abs_diff", "seq_mean", _log_ppl_abs_diff, 0.0, "|log perplexity difference| of a response"),
)


def metric_values(sums: MismatchSums) -> dict[tuple[str, str], float]:
    """Return the value of each of METRICS, by name and reduction."""
    return {(metric.name, metric.reduction): metric.formula(sums).value for metric in METRICS}


def metric_table(sums: MismatchSums) -> pd.DataFrame:
    """Return one row for each of METRICS: metric, reduction, value, se (float64), n_tokens, n_sequences (int64).

    With delta = logprobs_b - logprobs_a, rho = exp(delta) and tokens drawn from a, these estimates have no bias:

        KL(a || b): k1 = E[-delta] and k3 = E[rho - 1 - delta]
        KL(b || a): kl_pg_nonneg = E[rho delta - rho + 1]
        total variation: tv = E|rho - 1| / 2
        chi^2(b || a): chi2_seq = E[product of rho over a response, squared] - 1, which may be negative in a sample

    The effective sample size is ess_frac = E[rho]^2 / E[rho^2]. The reductions are

        token_mean: mean over tokens, with se
        seq_mean_token_sum, seq_mean: mean over responses of a sum, or of another number of the response, with se
        token, seq: moments, quantiles (relative error 2**-8) and extremes of tokens or responses, without se
        count: a number of tokens

    n_nonfinite counts tokens that are not finite. No metric includes these tokens; seq_mean and seq also leave out
    their responses.
    """
    rows = [(metric.name, metric.reduction, *metric.formula(sums)) for metric in METRICS]
    table = pd.DataFrame(rows, columns=["metric", "reduction", "value", "se"])
    table["n_tokens"] = int(sums.sequences["finite"].sum())
    of_whole = table["reduction"].isin(["seq_mean", "seq"])
    table["n_sequences"] = np.where(of_whole, len(sums.whole), len(sums.counted))
    return table
