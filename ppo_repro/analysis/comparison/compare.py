"""Compare two runs at four levels.

The level `bitwise` compares every recorded bit, `numeric` the log-probs of the same tokens (`same_prompts`),
`distribution` scores and lengths, and `outcome` the final results. `findings_table` adds the verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis import significance
from ppo_repro.analysis.comparison.findings import Finding, Level, findings_table
from ppo_repro.analysis.comparison.same_prompts import manifests, numeric_findings, paired_responses
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.diff import first_difference
from ppo_repro.statistics.clusters import Floats

# nats of mean |delta|; a smaller difference of two float32 forwards is rounding
MARGIN = 1e-3


def compare_runs(
    run_a: Path | str,
    run_b: Path | str,
    rng: np.random.Generator,
    *,
    margin: float = MARGIN,
    column: str = "old_logprobs",
    iterations: Sequence[int] | None = None,
    alpha: float = 0.05,
) -> pd.DataFrame:
    """Compare two language runs at all four levels; final results of single runs get no verdict.

    Args:
        rng: draws sign changes.
        margin: mean |delta| of `column` below which log-probs count as the same, nats.
        column: the log-probs to compare, one of LOGPROB_COLUMNS.
        iterations: iterations for the levels numeric and distribution; None for all.

    Returns:
        A `FindingRow` for each finding.

    Raises:
        UserError: a margin or alpha out of range, or records that are missing, unknown or damaged.
    """
    if not 0 < margin < math.inf or not 0 < alpha < 0.5:
        raise UserError(f"margin = {margin}, alpha = {alpha}: margin is positive, alpha between 0 and 0.5")
    pairs = paired_responses(run_a, run_b, column=column, iterations=iterations)
    levels: dict[Level, list[Finding]] = {
        "bitwise": [_bitwise_finding(run_a, run_b)],
        "numeric": numeric_findings(pairs, rng, column=column, margin=margin, alpha=alpha),
        "distribution": _distribution_findings(run_a, run_b, iterations, rng),
        "outcome": _outcome_findings(run_a, run_b),
    }
    return findings_table(str(run_a), str(run_b), levels, alpha)


def _bitwise_finding(run_a: Path | str, run_b: Path | str) -> Finding:
    """Compare the fingerprints; if they differ, the verdict names the first difference."""
    a, b = manifests(run_a, run_b)
    is_identical = a.fingerprint == b.fingerprint
    verdict = "identical"
    if not is_identical:
        difference = first_difference(run_a, run_b)
        verdict = f"different: {difference.describe()}" if difference else "different"
    count = max(len(a.iterations), len(b.iterations))
    return Finding("fingerprint", float(is_identical), count, "SHA-256 of all values", verdict=verdict)


def _distribution_findings(
    run_a: Path | str, run_b: Path | str, iterations: Sequence[int] | None, rng: np.random.Generator
) -> list[Finding]:
    """Compare scores and lengths of all responses (b - a) by a sign-flip test, or Welch's t-test if no pair exists."""
    keys, metrics = ["iteration", "sequence", "prompt_key"], ["scores", "response_length"]
    a, b = (reader.read_sequences(run, iterations=iterations, columns=[*keys, *metrics]) for run in (run_a, run_b))
    pairs = a.merge(b, on=keys, suffixes=("_a", "_b"), validate="one_to_one")
    findings = []
    for metric in metrics:
        columns = (pairs[f"{metric}_a"], pairs[f"{metric}_b"]) if len(pairs) else (a[metric], b[metric])
        values_a, values_b = (values.to_numpy(np.float64) for values in columns)
        if not (np.isfinite(values_a).all() and np.isfinite(values_b).all()):
            # a test without these values would compare only a part of the responses
            count = len(values_a) + len(values_b)
            findings.append(Finding(metric, math.nan, count, "values are not finite", claim="difference"))
        elif len(pairs):
            findings.append(_paired_finding(metric, values_b - values_a, rng))
        else:
            findings.append(_unpaired_finding(metric, values_a, values_b))
    return findings


def _paired_finding(metric: str, differences: Floats, rng: np.random.Generator) -> Finding:
    """Test the differences of pairs by sign changes."""
    test = significance.sign_flip(differences, rng)
    method = f"mean of pairs; {test.relabellings} sign changes"
    return Finding(metric, test.stat, len(differences), method, claim="difference", p_value=test.p_value)


def _unpaired_finding(metric: str, a: Floats, b: Floats) -> Finding:
    """Test the difference of the means of two samples by Welch's t."""
    estimate = significance.welch(a, b)
    p_value = significance.t_test(estimate)
    return Finding(metric, estimate.mean, len(a) + len(b), "Welch's t", claim="difference", p_value=p_value)


def _outcome_findings(run_a: Path | str, run_b: Path | str) -> list[Finding]:
    """Return the difference of each final result that is a number in both runs."""
    a, b = (_final_numbers(recorded.final) for recorded in manifests(run_a, run_b))
    method = "difference b - a of one run each: seeds decide, see `ppo-repro analyse table`"
    return [Finding(f"final.{name}", b[name] - a[name], 1, method, verdict="one seed") for name in a if name in b]


def _final_numbers(final: Mapping[str, float | int | str]) -> dict[str, float]:
    return {name: float(value) for name, value in final.items() if not isinstance(value, str)}
