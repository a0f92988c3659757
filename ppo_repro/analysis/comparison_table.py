"""Make the table of a comparison: one row per finding, with its verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import pandas as pd

from ppo_repro.analysis.significance import holm

Level = Literal["bitwise", "numeric", "distribution", "outcome"]
# difference: H0 is no difference, corrected for the number of metrics; equivalence: H0 is a difference of at least the
# margin; number: an estimate without a test
Claim = Literal["difference", "equivalence", "number"]


@dataclass(frozen=True)
class Row:
    """One finding of a comparison; `run_compare` adds the verdict of a test."""

    level: Level
    metric: str
    stat: float
    n_units: int
    method: str
    claim: Claim = "number"
    p_value: float = math.nan
    ci_lo: float = math.nan
    ci_hi: float = math.nan
    margin: float = math.nan
    verdict: str = ""


def run_compare(run_a: str, run_b: str, rows: Sequence[Row], alpha: float) -> pd.DataFrame:
    """Return the table of a comparison, with a verdict on each row.

    A difference is "different" if p_holm <= alpha, otherwise "no difference found", which does not mean "the same":
    a test of equivalence says more. An equivalence is "equivalent" if p_value <= alpha, otherwise "not shown".

    Returns:
        run_a, run_b, level, metric, stat, p_value, p_holm, ci_lo, ci_hi, margin, verdict, n_units, method. p_holm has
        Holm's correction over the metrics of one level that are tested for a difference.
    """
    corrected = [math.nan] * len(rows)
    for level in {row.level for row in rows}:
        tested = [i for i, row in enumerate(rows) if row.level == level and row.claim == "difference"]
        for row_index, p_holm in zip(tested, holm([rows[i].p_value for i in tested]), strict=True):
            corrected[row_index] = float(p_holm)
    numbers = ["stat", "p_value", "p_holm", "ci_lo", "ci_hi", "margin"]
    table = pd.DataFrame([vars(row) for row in rows], columns=[field.name for field in fields(Row)])
    table = table.assign(run_a=run_a, run_b=run_b, p_holm=corrected).astype(dict.fromkeys(numbers, "float64"))
    table["verdict"] = [_verdict(row, p_holm, alpha) for row, p_holm in zip(rows, corrected, strict=True)]
    return table[["run_a", "run_b", "level", "metric", *numbers, "verdict", "n_units", "method"]]


def _verdict(row: Row, p_holm: float, alpha: float) -> str:
    if row.claim == "number":
        return row.verdict
    p_value = p_holm if row.claim == "difference" else row.p_value
    if math.isnan(p_value):
        return "too little to say"
    if row.claim == "difference":
        return "different" if p_value <= alpha else "no difference found"
    return "equivalent" if p_value <= alpha else "not shown"
