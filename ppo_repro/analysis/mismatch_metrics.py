"""How far apart are two log-probs of the same token? Sums over tokens by response, and the metrics from the sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.pairs import NO_TOKEN
from ppo_repro.base.errors import UserError
from ppo_repro.statistics import clusters
from ppo_repro.statistics.bits import has_steps
from ppo_repro.statistics.clusters import Floats, Ratio
from ppo_repro.statistics.kl import k1, k3


@dataclass(frozen=True)
class Sums:
    """Sums over tokens: one row per response, and the counts of |delta| and of ULPs in each bin of `log_bins`.

    Columns of `sequences`: length, finite (tokens with two finite log-probs), diverged (whether any bit differs); over
    the finite tokens the sums of `quantities`, and the extremes abs_max, prob_abs_max, ulp_max, rho_min and rho_max,
    which are NaN without a token.
    """

    sequences: pd.DataFrame
    abs_counts: pd.Series
    ulp_counts: pd.Series
    masked: int

    @property
    def counted(self) -> pd.DataFrame:
        """Return the responses with a finite token."""
        return self.sequences[self.sequences["finite"] > 0]

    @property
    def whole(self) -> pd.DataFrame:
        """Return the responses whose tokens are all finite."""
        return self.sequences[self.sequences["finite"] == self.sequences["length"]]


def sums_of(tokens: pd.DataFrame, masked: int = 0) -> Sums:
    """Sum `with_mismatch` rows of whole responses; `masked` counts the tokens that a mask removed before."""
    starts = clusters.sequence_starts(tokens)
    finite = tokens["finite"].to_numpy()
    a, b = (tokens[name].to_numpy().astype(np.float64) for name in ("logprobs_a", "logprobs_b"))
    large = finite & has_steps(a, b)
    size, rho, ulp = (tokens[name].to_numpy().astype(np.float64) for name in ("abs_delta", "rho", "ulp"))

    def extreme(ufunc: np.ufunc, values: Floats, where: npt.NDArray[np.bool_]) -> Floats:
        return ufunc.reduceat(np.where(where, values, math.nan), starts) if len(starts) else np.zeros(0)

    rows = {
        "length": np.diff(np.append(starts, len(tokens))),
        "finite": clusters.segment_sums(finite.astype(float), starts),
        "diverged": clusters.segment_sums((~tokens["bitwise_equal"].to_numpy()).astype(float), starts) > 0,
        **{
            name: clusters.segment_sums(np.where(finite, values, 0.0), starts)
            for name, values in quantities(tokens).items()
        },
        "abs_max": extreme(np.fmax, size, finite),
        "prob_abs_max": extreme(np.fmax, np.abs(tokens["prob_diff"].to_numpy()), finite),
        "ulp_max": extreme(np.fmax, ulp, large),
        "rho_min": extreme(np.fmin, rho, finite),
        "rho_max": extreme(np.fmax, rho, finite),
    }
    return Sums(pd.DataFrame(rows), _binned(size[finite]), _binned(ulp[large]), masked)


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
            "k1": k1(-delta),
            "k3": tokens["k3"].to_numpy(),
            # rho delta - (rho - 1) in a form that is never negative
            "kl_pg_nonneg": rho * k3(delta),
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


Formula = Callable[[Sums], Ratio]


@dataclass(frozen=True)
class Metric:
    """A metric by one reduction: a row of `update_table` and of the summary."""

    name: str
    reduction: str
    formula: Formula
    ideal: float | None  # the value of two equal sides
    meaning: str = ""


def _token_mean(column: str) -> Formula:
    """Return the formula of a mean over finite tokens, with a standard error clustered by response."""

    def mean(sums: Sums) -> Ratio:
        return clusters.ratio_of_sums(sums.counted[column].to_numpy(), sums.counted["finite"].to_numpy())

    return mean


def _rho_mean(sums: Sums) -> Ratio:
    x = _token_mean("x")(sums)
    return Ratio(1.0 + x.value, x.se)


def _k3_of_responses(sums: Sums) -> Ratio:
    return clusters.mean(sums.counted["k3"].to_numpy())


def _largest(column: str) -> Formula:
    """Return the formula of the largest value of the responses; NaN without a value."""

    def largest(sums: Sums) -> Ratio:
        return Ratio(float(sums.sequences[column].max()))

    return largest


def _rho_min(sums: Sums) -> Ratio:
    return Ratio(float(sums.sequences["rho_min"].min()))


def _abs_p99(sums: Sums) -> Ratio:
    # the middle of the last bin may lie above the largest value
    return Ratio(min(clusters.quantile(sums.abs_counts, 0.99), _largest("abs_max")(sums).value))


def _ulp_p99(sums: Sums) -> Ratio:
    # below 256 every integer has a bin of its own
    return Ratio(float(np.floor(clusters.quantile(sums.ulp_counts, 0.99))))


def _ess_frac(sums: Sums) -> Ratio:
    return effective_size(_token_mean("x")(sums), _token_mean("x_sq")(sums))


def _moments_of_responses(sums: Sums) -> tuple[Ratio, Ratio]:
    """Return the means over whole responses of x = product of rho - 1, and of x^2."""
    with np.errstate(over="ignore"):
        x = np.expm1(-sums.whole["k1"].to_numpy())
        return clusters.mean(x), clusters.mean(x**2)


def _chi2_seq(sums: Sums) -> Ratio:
    x, x_sq = _moments_of_responses(sums)
    return Ratio(2.0 * x.value + x_sq.value)


def _ess_seq(sums: Sums) -> Ratio:
    return effective_size(*_moments_of_responses(sums))


def _log_ppl_abs_diff(sums: Sums) -> Ratio:
    return clusters.mean(np.abs(sums.whole["k1"].to_numpy()) / sums.whole["length"])


def _frac_diverged(sums: Sums) -> Ratio:
    return Ratio(clusters.mean(sums.whole["diverged"].to_numpy(float)).value)


def _n_tokens(sums: Sums) -> Ratio:
    return Ratio(float(sums.sequences["length"].sum()))


def _n_masked(sums: Sums) -> Ratio:
    return Ratio(float(sums.masked))


def _n_nonfinite(sums: Sums) -> Ratio:
    return Ratio(float(sums.sequences["length"].sum() - sums.sequences["finite"].sum()))


def effective_size(x: Ratio, x_sq: Ratio) -> Ratio:
    """Return ESS / N = 1 / (1 + Var(w) / E[w]^2) of w = 1 + x, from the means of x and x^2.

    NaN if a square is beyond float64.
    """
    if not math.isfinite(x_sq.value) or x.value <= -1.0:
        return Ratio(math.nan)
    # rounding may make a variance of zero negative
    variance = max(x_sq.value - x.value**2, 0.0)
    return Ratio(1.0 / (1.0 + variance / (1.0 + x.value) ** 2))


METRICS = (
    Metric("n_tokens", "count", _n_tokens, None, "tokens compared"),
    Metric("n_masked", "count", _n_masked, None, "tokens that a mask removed"),
    Metric("n_nonfinite", "count", _n_nonfinite, 0.0, "tokens with an infinite or NaN log-prob, left out below"),
    Metric("frac_bitwise_equal", "token_mean", _token_mean("frac_bitwise_equal"), 1.0, "log-probs equal in every bit"),
    Metric("frac_diverged", "seq", _frac_diverged, 0.0, "responses with an unequal token"),
    Metric("ulp_p99", "token", _ulp_p99, 0.0, "float32 steps between the two, where |log-prob| > 0.01"),
    Metric("ulp_max", "token", _largest("ulp_max"), 0.0),
    Metric("abs_mean", "token_mean", _token_mean("abs_mean"), 0.0, "|delta|, nats; delta = b - a"),
    Metric("abs_p99", "token", _abs_p99, 0.0),
    Metric("abs_max", "token", _largest("abs_max"), 0.0),
    Metric("prob_abs_mean", "token_mean", _token_mean("prob_abs_mean"), 0.0, "difference of probabilities"),
    Metric("prob_abs_max", "token", _largest("prob_abs_max"), 0.0),
    Metric("k1", "token_mean", _token_mean("k1"), 0.0, "KL(a || b), nats per token, signed estimator"),
    Metric("k3", "token_mean", _token_mean("k3"), 0.0, "KL(a || b), nats per token, never negative"),
    Metric("k3", "seq_mean_token_sum", _k3_of_responses, 0.0, "KL(a || b), nats per response"),
    Metric("kl_pg_nonneg", "token_mean", _token_mean("kl_pg_nonneg"), 0.0, "KL(b || a), nats per token"),
    Metric("tv", "token_mean", _token_mean("tv"), 0.0, "total variation"),
    Metric("rho_mean", "token_mean", _rho_mean, 1.0, "mean of rho = exp(delta)"),
    Metric("rho_min", "token", _rho_min, 1.0),
    Metric("rho_max", "token", _largest("rho_max"), 1.0),
    Metric("ess_frac", "token", _ess_frac, 1.0, "effective sample size of the weights rho, share of tokens"),
    Metric("ess_seq", "seq", _ess_seq, 1.0, "the same of products over responses, share of responses"),
    Metric("chi2_seq", "seq", _chi2_seq, 0.0, "chi-squared of products over responses"),
    Metric("log_ppl_abs_diff", "seq_mean", _log_ppl_abs_diff, 0.0, "|log perplexity difference| of a response"),
)


def update_table(sums: Sums) -> pd.DataFrame:
    """Return one row for each of METRICS: metric, reduction, value, se (float64), n_tokens, n_sequences (int64).

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
    rows = [(metric.name, metric.reduction, *metric.formula(sums)) for metric in METRICS]
    table = pd.DataFrame(rows, columns=["metric", "reduction", "value", "se"])
    table["n_tokens"] = int(sums.sequences["finite"].sum())
    of_whole = table["reduction"].isin(["seq_mean", "seq"])
    table["n_sequences"] = np.where(of_whole, len(sums.whole), len(sums.counted))
    return table
