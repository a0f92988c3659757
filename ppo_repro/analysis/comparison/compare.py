"""Compare two runs by four nested questions.

The level `bitwise` compares every recorded bit, `numeric` the log-probs of the same tokens, `distribution` scores and
lengths, and `outcome` the final results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.comparison.distribution import distribution_findings
from ppo_repro.analysis.comparison.findings import Finding, Level, findings_table
from ppo_repro.analysis.comparison.numeric import numeric_findings
from ppo_repro.analysis.comparison.same_prompts import manifests, paired_responses
from ppo_repro.base.errors import UserError
from ppo_repro.records.diff import first_difference

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
        The table of `findings_table`.

    Raises:
        UserError: a margin or alpha out of range, or records that are missing, unknown or damaged.
    """
    if not 0 < margin < math.inf or not 0 < alpha < 0.5:
        raise UserError(f"margin = {margin}, alpha = {alpha}: margin is positive, alpha between 0 and 0.5")
    responses = paired_responses(run_a, run_b, column=column, iterations=iterations)
    levels: dict[Level, list[Finding]] = {
        "bitwise": [_bitwise_finding(run_a, run_b)],
        "numeric": numeric_findings(responses, rng, column=column, margin=margin, alpha=alpha),
        "distribution": distribution_findings(run_a, run_b, iterations, rng),
        "outcome": _outcome_findings(run_a, run_b),
    }
    return findings_table(str(run_a), str(run_b), levels, alpha)


def _bitwise_finding(run_a: Path | str, run_b: Path | str) -> Finding:
    """Compare the fingerprints; if they differ, the verdict names the first difference."""
    a, b = manifests(run_a, run_b)
    same, verdict = a.fingerprint == b.fingerprint, "identical"
    if not same:
        first = first_difference(run_a, run_b)
        verdict = f"different: {first.describe()}" if first else "different"
    count = max(len(a.iterations), len(b.iterations))
    return Finding("fingerprint", float(same), count, "SHA-256 of all values", verdict=verdict)


def _outcome_findings(run_a: Path | str, run_b: Path | str) -> list[Finding]:
    """Return the difference of each final result that both runs have."""
    a, b = (recorded.final for recorded in manifests(run_a, run_b))
    how = "difference b - a of one run each: seeds decide, see `ppo-repro analyse table`"
    pairs = {name: (value, b.get(name)) for name, value in a.items()}
    return [
        Finding(f"final.{name}", float(y) - float(x), 1, how, verdict="one seed")
        for name, (x, y) in pairs.items()
        if not isinstance(x, str) and y is not None and not isinstance(y, str)
    ]
