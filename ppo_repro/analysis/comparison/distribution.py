"""Compare the scores and lengths of the responses of two runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppo_repro.analysis import significance
from ppo_repro.analysis.comparison.findings import Finding
from ppo_repro.records import reader
from ppo_repro.statistics.clusters import Floats


def distribution_findings(
    run_a: Path | str, run_b: Path | str, iterations: Sequence[int] | None, rng: np.random.Generator
) -> list[Finding]:
    """Compare scores and lengths of all responses (b - a) by a sign-flip test, or Welch's t-test if no pair exists.

    Args:
        iterations: the iterations to compare; None for all.
        rng: draws sign changes.

    Returns:
        The findings of the level `distribution` for `findings_table`.

    Raises:
        UserError: damaged records.
    """
    names = ["iteration", "sequence", "prompt_key", "scores", "response_length"]
    a, b = (reader.read_sequences(run, iterations=iterations, columns=names) for run in (run_a, run_b))
    pairs, findings = a.merge(b, on=names[:3], suffixes=("_a", "_b"), validate="one_to_one"), []
    for name in names[3:]:
        columns = (pairs[f"{name}_a"], pairs[f"{name}_b"]) if len(pairs) else (a[name], b[name])
        x, y = (values.to_numpy(np.float64) for values in columns)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            # a test without these values would compare only a part of the responses
            findings.append(Finding(name, math.nan, len(x) + len(y), "values are not finite", claim="difference"))
        elif len(pairs):
            findings.append(_paired(name, y - x, rng))
        else:
            findings.append(_unpaired(name, x, y))
    return findings


def _paired(metric: str, differences: Floats, rng: np.random.Generator) -> Finding:
    """Test the differences of pairs by sign changes."""
    test = significance.sign_flip(differences, rng)
    how = f"mean of pairs; {test.relabellings} sign changes"
    return Finding(metric, test.stat, len(differences), how, claim="difference", p_value=test.p_value)


def _unpaired(metric: str, a: Floats, b: Floats) -> Finding:
    """Test the difference of the means of two samples by Welch's t."""
    estimate = significance.welch(a, b)
    p_value = significance.t_test(estimate)
    return Finding(metric, estimate.mean, len(a) + len(b), "Welch's t", claim="difference", p_value=p_value)
