"""Compare the log-probs of the responses that two runs sampled alike."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis import significance
from ppo_repro.analysis.comparison.findings import Finding
from ppo_repro.analysis.comparison.same_prompts import hazard
from ppo_repro.statistics.clusters import Floats, ratio_of_sums


def numeric_findings(
    responses: pd.DataFrame, rng: np.random.Generator, *, column: str, margin: float, alpha: float
) -> list[Finding]:
    """Compare the log-probs of pairs of responses.

    Args:
        responses: the frame of `paired_responses`.
        rng, column, margin, alpha: the arguments of `compare_runs`.

    Returns:
        The findings of the level `numeric` for `findings_table`.
    """
    same = responses[~responses["diverged"]]
    finite = np.isfinite(same["abs_sum"].to_numpy(np.float64))
    findings = _divergence(responses, same, int((~finite).sum()), column)
    return [*findings, *_deltas(same[finite], rng, column, margin, alpha)] if finite.any() else findings


def _divergence(responses: pd.DataFrame, same: pd.DataFrame, nonfinite: int, column: str) -> list[Finding]:
    """Return how many pairs have the same tokens, and how fast the pairs diverge."""
    count = len(responses)
    share = len(same) / count if count else math.nan
    findings = [
        Finding("same_responses", share, count, "share with all tokens the same"),
        Finding("n_nonfinite", float(nonfinite), len(same), f"responses, {column}; left out below"),
    ]
    if count:
        rate, low, high = hazard(responses["compared"].to_numpy(np.int64), responses["diverged"].to_numpy(bool))
        method = "first other tokens per token; exact Poisson interval"
        findings.append(Finding("divergence_hazard", rate, count, method, ci_lo=low, ci_hi=high))
    return findings


def _deltas(
    compared: pd.DataFrame, rng: np.random.Generator, column: str, margin: float, alpha: float
) -> list[Finding]:
    """Return bits, delta and |delta| of the pairs with the same tokens and finite log-probs, at least one."""
    lengths = compared["compared"].to_numpy(np.int64)
    deltas, absolute = (compared[name].to_numpy(np.float64) for name in ("delta_sum", "abs_sum"))
    equal = float((compared["unequal"] == 0).mean())
    test = significance.sign_flip(deltas / lengths, rng)
    how = f"mean of responses; {test.relabellings} sign changes{' (all)' if test.exact else ''}"
    return [
        Finding(f"{column}.bitwise", equal, len(compared), "share of them with all bits equal"),
        Finding(f"{column}.delta", test.stat, len(compared), how, claim="difference", p_value=test.p_value),
        _token_mean(f"{column}.delta", deltas, lengths, alpha),
        _equivalence(f"{column}.abs_delta", absolute / lengths, margin, alpha),
        _token_mean(f"{column}.abs_delta", absolute, lengths, alpha),
    ]


def _equivalence(metric: str, sizes: Floats, margin: float, alpha: float) -> Finding:
    """Test by two one-sided t-tests whether the mean is below the margin."""
    size = significance.one_sample(sizes)
    low, high = significance.t_interval(size, 1 - 2 * alpha)
    return Finding(
        metric,
        size.mean,
        len(sizes),
        "mean of responses; TOST",
        claim="equivalence",
        p_value=significance.tost(size, margin),
        ci_lo=low,
        ci_hi=high,
        margin=margin,
    )


def _token_mean(metric: str, sums: Floats, lengths: npt.NDArray[np.int64], alpha: float) -> Finding:
    """Return the mean over tokens, from the sums and lengths of the responses."""
    value, se = ratio_of_sums(sums, lengths.astype(np.float64))
    low, high = significance.t_interval(significance.Estimate(value, se, len(sums) - 1), 1 - alpha)
    return Finding(metric, value, len(sums), "token mean; clustered by response", ci_lo=low, ci_hi=high)
