"""The metrics of one iteration or of a whole run, computed from its sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from analysis.mismatch.sums import MismatchSums
from analysis.stats import exact_sums
from analysis.stats.exact_sums import ClusterSums, Estimate

UPDATE_COLUMNS = ["metric", "reduction", "value", "se", "tokens", "sequences"]
# token means with a standard error clustered by sequence: metric -> the sum it is read from
TOKEN_MEANS = {
    "frac_bitwise_equal": "equal",
    "abs_mean": "abs",
    "prob_abs_mean": "prob_abs",
    "mult_err": "mult_err",
    "k1": "k1",
    "k2": "k2",
    "k3": "k3",
    "kl_pg": "kl_pg",
    "kl_pg_nonneg": "kl_pg_nonneg",
    "tv": "tv",
    "one_sided_frac": "one_sided",
}
BY_SEQUENCE = ("abs_mean", "k1", "k2", "k3")
SEQUENCE_MEANS = (
    *("log_rho_seq", "rho_geo", "ppl_ratio", "ppl_a", "ppl_b", "log_ppl_a", "log_ppl_b"),
    *("log_ppl_diff", "log_ppl_abs_diff"),
)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
# a variance below this share of the mean square is rounding error
_RESOLVED = 1e-12


@dataclass(frozen=True)
class Moments:
    """How two columns a and b are related, from the sums of a, b - a and their products."""

    pearson_gap: float  # 1 - r
    slope: float  # of b - a on a, least squares


def update_table(sums: MismatchSums) -> pd.DataFrame:
    """Long: metric, reduction, value, se (float64), tokens, sequences (int64).

    Reductions: token_mean, seq_mean_token_mean and seq_mean_token_sum as their names say; seq_mean, the mean over
    sequences of a quantity of the sequence; token and seq, functions of moments, quantiles (relative error 2**-8)
    and extremes, without se; count. With delta = logprobs_b - logprobs_a, rho = exp(delta) and tokens drawn from a:

    k1 = E[-delta] and k3 = E[rho - 1 - delta] estimate KL(a || b), kl_pg = E[rho delta] and kl_pg_nonneg =
    E[rho delta - rho + 1] KL(b || a), tv = E|rho - 1| / 2 the total variation, chi2_token = E[rho^2] - 1
    chi^2(b || a), all without bias (chi2_token may be negative in a sample); ess_frac = 1 / (1 + cv2),
    cv2 = Var(rho) / E[rho]^2; pearson_*_gap = 1 - r. k3_over_k1 is NaN where |k1| is below three standard errors, a
    correlation where nothing varies. Tokens that are not finite are counted in n_nonfinite and left out.
    """
    rows = [*_token_rows(sums), *_moment_rows(sums), *_sequence_rows(sums), *_count_rows(sums)]
    table = pd.DataFrame(
        [(metric, reduction, estimate.value, estimate.se) for metric, reduction, estimate in rows],
        columns=UPDATE_COLUMNS[:4],
    )
    of_sequences = table["reduction"].isin(["seq_mean", "seq"])
    table["tokens"] = sums.linear.items
    table["sequences"] = of_sequences.map({True: sums.weights.clusters, False: sums.linear.clusters}).astype("int64")
    return table


def wide(table: pd.DataFrame) -> pd.DataFrame:
    """One row per iteration (or run) and one column `metric/reduction` per value of a long table."""
    keys = [name for name in ("run", "pair", "iteration") if name in table]
    named = table.assign(column=table["metric"] + "/" + table["reduction"])
    order = list(dict.fromkeys(named["column"]))
    if not keys:
        return named.set_index("column")["value"].to_frame().T.reset_index(drop=True)[order]
    table = named.pivot(index=keys, columns="column", values="value")[order].reset_index()
    table.columns.name = None
    return table


def _token_rows(sums: MismatchSums) -> list[tuple[str, str, Estimate]]:
    linear = sums.linear
    rows = [(metric, "token_mean", exact_sums.item_mean(linear, name)) for metric, name in TOKEN_MEANS.items()]
    excess = exact_sums.item_mean(linear, "x")
    rows.append(("rho_mean", "token_mean", Estimate(1.0 + excess.value, excess.se)))
    for metric in BY_SEQUENCE:
        name = TOKEN_MEANS[metric]
        rows.append((metric, "seq_mean_token_mean", exact_sums.cluster_mean(linear, name)))
        rows.append((metric, "seq_mean_token_sum", exact_sums.cluster_sum_mean(linear, name)))
    rows.append(("hazard", "token_mean", exact_sums.item_mean(sums.survival, "hazard")))
    return rows


def _moment_rows(sums: MismatchSums) -> list[tuple[str, str, Estimate]]:
    def mean(name: str) -> float:
        return exact_sums.item_mean(sums.linear, name).value

    delta_sq, k1 = 2.0 * mean("k2"), exact_sums.item_mean(sums.linear, "k1")
    # a KL below its own error has no certain sign, let alone a ratio
    resolved = abs(k1.value) >= 3.0 * k1.se
    probs, logps = moments(sums.linear, "prob"), moments(sums.linear, "logp")
    values = {
        "abs_std": _root(delta_sq - mean("abs") ** 2),
        "delta_std": _root(delta_sq - k1.value**2),
        "prob_abs_std": _root(mean("prob_diff_sq") - mean("prob_abs") ** 2),
        "rho_std": _root(mean("x_sq") - mean("x") ** 2),
        "pearson_prob": 1.0 - probs.pearson_gap,
        "pearson_logp": 1.0 - logps.pearson_gap,
        "pearson_prob_gap": probs.pearson_gap,
        "pearson_logp_gap": logps.pearson_gap,
        "delta_logp_slope": logps.slope,
        "k3_over_k1": mean("k3") / k1.value if resolved and k1.value else math.nan,
        **dict(zip(("chi2_token", "cv2", "ess_frac"), weight_moments(sums.linear, "x", "x_sq"), strict=True)),
        "delta_min": _some(sums, sums.delta.smallest),
        "delta_max": _some(sums, sums.delta.largest),
        "rho_min": _some(sums, sums.rho.smallest),
        "rho_max": _some(sums, sums.rho.largest),
        "abs_max": _some(sums, max(abs(sums.delta.smallest), abs(sums.delta.largest))),
        "prob_abs_max": _some(sums, max(abs(sums.prob_diff.smallest), abs(sums.prob_diff.largest))),
        "ulp_max": sums.ulp.largest if math.isfinite(sums.ulp.largest) else math.nan,
    }
    for label, q in QUANTILES.items():
        # the middle of the last bin may lie above the largest value
        values[f"abs_{label}"] = min(exact_sums.quantile(sums.abs_counts, q), values["abs_max"])
        # below 256 every integer has a bin of its own
        ulp = exact_sums.quantile(sums.ulp_counts, q)
        values[f"ulp_{label}"] = math.nan if math.isnan(ulp) else float(math.floor(ulp))
    return [(metric, "token", Estimate(value)) for metric, value in values.items()]


def weight_moments(sums: ClusterSums, excess: str, squares: str) -> tuple[float, float, float]:
    """chi2 = E[w^2] - 1, cv2 = Var(w) / E[w]^2 and ESS / N = 1 / (1 + cv2) of w = 1 + x, from the means of x and x^2.

    The last two are NaN where a square is beyond float64.
    """
    x, x_sq = exact_sums.item_mean(sums, excess).value, exact_sums.item_mean(sums, squares).value
    if not math.isfinite(x_sq) or x <= -1.0:
        return 2.0 * x + x_sq, math.nan, math.nan
    # rounding may make a variance of zero negative
    cv2 = max(x_sq - x * x, 0.0) / (1.0 + x) ** 2
    return 2.0 * x + x_sq, cv2, 1.0 / (1.0 + cv2)


def moments(sums: ClusterSums, name: str) -> Moments:
    """Correlation r of a and b = a + d, and slope of d on a, from means of a, a^2, d, d^2, d (a + b), d a.

    1 - r = (Var d - (s_a - s_b)^2) / (2 s_a s_b) keeps digits that would be lost by rounding r, and is exactly 0 for
    equal columns. NaN where a or b does not vary.
    """

    def mean(column: str) -> float:
        return exact_sums.item_mean(sums, column).value

    a, a_sq = mean(f"{name}_a"), mean(f"{name}_a_sq")
    d = -mean("k1") if name == "logp" else mean("prob_diff")
    d_sq = 2.0 * mean("k2") if name == "logp" else mean("prob_diff_sq")
    cross = mean(f"{name}_cross") - d * (2.0 * a + d)
    var_a, var_d = a_sq - a * a, max(d_sq - d * d, 0.0)
    # Var b - Var a = Cov(b - a, b + a)
    var_b = var_a + cross
    if not (var_a > _RESOLVED * a_sq and var_b > _RESOLVED * (a_sq + d_sq)):
        return Moments(math.nan, math.nan)
    s_a, s_b = math.sqrt(var_a), math.sqrt(var_b)
    apart = (var_d - (cross / (s_a + s_b)) ** 2) / (2.0 * s_a * s_b)
    slope = (mean("delta_logp_a") - d * a) / var_a if name == "logp" else math.nan
    return Moments(max(apart, 0.0), slope)


def _sequence_rows(sums: MismatchSums) -> list[tuple[str, str, Estimate]]:
    weights = sums.weights
    rows = [(metric, "seq_mean", exact_sums.item_mean(weights, metric)) for metric in SEQUENCE_MEANS]
    excess = exact_sums.item_mean(weights, "x_seq")
    rows.append(("rho_seq", "seq_mean", Estimate(1.0 + excess.value, excess.se)))
    diverged = sums.survival.sums["hazard"]
    share = exact_sums.value(diverged[0]) / sums.sequences if sums.sequences else math.nan
    rows.append(("frac_diverged", "seq", Estimate(share)))
    spread = weight_moments(weights, "x_seq", "x_seq_sq")
    rows += [
        (f"{name}_seq", "seq", Estimate(value)) for name, value in zip(("chi2", "cv2", "ess"), spread, strict=True)
    ]
    has_complete = weights.clusters > 0
    rows.append(("log_ppl_diff_min", "seq", Estimate(sums.log_ppl_diff.smallest if has_complete else math.nan)))
    rows.append(("log_ppl_diff_max", "seq", Estimate(sums.log_ppl_diff.largest if has_complete else math.nan)))
    return rows


def _count_rows(sums: MismatchSums) -> list[tuple[str, str, Estimate]]:
    counts = {
        "n_tokens": sums.tokens,
        "n_sequences": sums.sequences,
        "n_masked": sums.masked,
        "n_nonfinite": sums.nonfinite,
        "n_incomplete_sequences": sums.sequences - sums.weights.clusters,
        "n_exact_zero_logp_a": sums.exact_zero_a,
        "n_exact_zero_logp_b": sums.exact_zero_b,
        "n_ulp": int(sums.ulp_counts.sum()),
    }
    return [(metric, "count", Estimate(float(count))) for metric, count in counts.items()]


def _root(variance: float) -> float:
    # rounding may make a variance of zero negative
    return math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else variance


def _some(sums: MismatchSums, value: float) -> float:
    return value if sums.linear.items else math.nan
