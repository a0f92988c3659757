"""Give each finding of a comparison a verdict, and return all findings as one table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

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
    verdict: str = ""  # only of the claim `number`


class FindingRow(NamedTuple):
    """A finding with its verdict: a row of `findings_table`."""

    run_a: str
    run_b: str
    level: str  # a Level
    metric: str
    stat: float
    p_value: float
    p_holm: float  # with Holm's correction over the metrics of the level that are tested for a difference
    ci_lo: float
    ci_hi: float
    margin: float
    verdict: str
    n_units: int
    method: str


def findings_table(run_a: str, run_b: str, levels: Mapping[Level, Sequence[Finding]], alpha: float) -> pd.DataFrame:
    """Return a `FindingRow` for each finding of each level.

    A difference is "different" if p_holm <= alpha, otherwise "no difference found", which does not mean "the same":
    a test of equivalence says more. An equivalence is "equivalent" if p_value <= alpha, otherwise "not shown".
    """
    rows = []
    for level, findings in levels.items():
        p_values = [finding.p_value if finding.claim == "difference" else math.nan for finding in findings]
        for finding, p_holm in zip(findings, holm(p_values), strict=True):
            verdict = _verdict(finding, p_holm, alpha)
            rows.append({**vars(finding), "level": level, "p_holm": p_holm, "verdict": verdict})
    return pd.DataFrame(rows).assign(run_a=run_a, run_b=run_b)[[*FindingRow._fields]]


def _verdict(finding: Finding, p_holm: float, alpha: float) -> str:
    if finding.claim == "number":
        return finding.verdict
    p_value = p_holm if finding.claim == "difference" else finding.p_value
    if math.isnan(p_value):
        return "too little to say"
    if finding.claim == "difference":
        return "different" if p_value <= alpha else "no difference found"
    return "equivalent" if p_value <= alpha else "not shown"
