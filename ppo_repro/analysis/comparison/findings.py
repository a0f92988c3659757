"""The table of a comparison: one finding a row, with a verdict on each test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import pandas as pd

from ppo_repro.analysis.significance import holm

Level = Literal["bitwise", "numeric", "distribution", "outcome"]
Claim = Literal["difference", "equivalence", "number"]


@dataclass(frozen=True)
class Finding:
    """One finding of a comparison at one level; `findings_table` adds the verdict of a test.

    The claim `difference` tests H0 that there is none, corrected for the number of metrics; `equivalence` tests H0 that
    there is one of at least the margin; `number` is an estimate without a test.
    """

    metric: str
    stat: float
    n_units: int
    method: str
    _: KW_ONLY
    claim: Claim = "number"
    p_value: float = math.nan
    ci_lo: float = math.nan
    ci_hi: float = math.nan
    margin: float = math.nan
    verdict: str = ""


def findings_table(run_a: str, run_b: str, levels: Mapping[Level, Sequence[Finding]], alpha: float) -> pd.DataFrame:
    """Return the table of a comparison from the findings of each level, with a verdict on each.

    A difference is "different" if p_holm <= alpha, otherwise "no difference found", which does not mean "the same":
    a test of equivalence says more. An equivalence is "equivalent" if p_value <= alpha, otherwise "not shown".

    Returns:
        run_a, run_b, level, metric, stat, p_value, p_holm, ci_lo, ci_hi, margin, verdict, n_units, method. p_holm has
        Holm's correction over the metrics of one level that are tested for a difference.
    """
    records = []
    for level, findings in levels.items():
        tested = [found.p_value if found.claim == "difference" else math.nan for found in findings]
        for found, p_holm in zip(findings, holm(tested), strict=True):
            verdict = _verdict(found, p_holm, alpha)
            records.append({"level": level, **vars(found), "p_holm": p_holm, "verdict": verdict})
    numbers = ["stat", "p_value", "p_holm", "ci_lo", "ci_hi", "margin"]
    table = pd.DataFrame(records).assign(run_a=run_a, run_b=run_b).astype(dict.fromkeys(numbers, "float64"))
    return table[["run_a", "run_b", "level", "metric", *numbers, "verdict", "n_units", "method"]]


def _verdict(found: Finding, p_holm: float, alpha: float) -> str:
    if found.claim == "number":
        return found.verdict
    p_value = p_holm if found.claim == "difference" else found.p_value
    if math.isnan(p_value):
        return "too little to say"
    if found.claim == "difference":
        return "different" if p_value <= alpha else "no difference found"
    return "equivalent" if p_value <= alpha else "not shown"
