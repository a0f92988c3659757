"""Are two runs the same? `ppo-repro analyse compare A B --seed 0` asks four nested questions, with a verdict on each.

The level `bitwise` compares every recorded bit, `numeric` the log-probs of the same tokens, `distribution` scores and
lengths, and `outcome` the final results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis import significance
from ppo_repro.analysis.clusters import Floats, ratio_of_sums
from ppo_repro.analysis.response_pairs import hazard, manifests, paired_responses
from ppo_repro.analysis.significance import holm
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.diff import first_difference

# nats of mean |delta|; a smaller difference of two float32 forwards is rounding
MARGIN = 1e-3
Level = Literal["bitwise", "numeric", "distribution", "outcome"]
# difference: H0 is no difference, corrected for the number of metrics; equivalence: H0 is a difference of at least the
# margin; number: an estimate without a test
Claim = Literal["difference", "equivalence", "number"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One finding of a comparison at one level; `run_compare` adds the verdict of a test."""

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


# the table: one row for each finding


def run_compare(run_a: str, run_b: str, levels: Mapping[Level, Sequence[Row]], alpha: float) -> pd.DataFrame:
    """Return the table of a comparison from the rows of each level, with a verdict on each row.

    A difference is "different" if p_holm <= alpha, otherwise "no difference found", which does not mean "the same":
    a test of equivalence says more. An equivalence is "equivalent" if p_value <= alpha, otherwise "not shown".

    Returns:
        run_a, run_b, level, metric, stat, p_value, p_holm, ci_lo, ci_hi, margin, verdict, n_units, method. p_holm has
        Holm's correction over the metrics of one level that are tested for a difference.
    """
    records = []
    for level, rows in levels.items():
        corrected = holm([row.p_value if row.claim == "difference" else math.nan for row in rows])
        for row, p_holm in zip(rows, corrected, strict=True):
            verdict = _verdict(row, p_holm, alpha)
            records.append({"level": level, **vars(row), "p_holm": p_holm, "verdict": verdict})
    numbers = ["stat", "p_value", "p_holm", "ci_lo", "ci_hi", "margin"]
    table = pd.DataFrame(records).assign(run_a=run_a, run_b=run_b).astype(dict.fromkeys(numbers, "float64"))
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


# the rows of each level


def numeric_rows(
    responses: pd.DataFrame, rng: np.random.Generator, *, column: str, margin: float, alpha: float
) -> list[Row]:
    """Compare the log-probs of pairs of responses.

    Args:
        responses: the frame of `paired_responses`.
        rng, column, margin, alpha: the arguments of `compare_runs`.

    Returns:
        The rows of the level `numeric` for `run_compare`.
    """
    same = responses[~responses["diverged"]]
    finite = np.isfinite(same["abs_sum"].to_numpy(np.float64))
    rows = _divergence_rows(responses, same, int((~finite).sum()), column)
    return [*rows, *_delta_rows(same[finite], rng, column, margin, alpha)] if finite.any() else rows


def _divergence_rows(responses: pd.DataFrame, same: pd.DataFrame, nonfinite: int, column: str) -> list[Row]:
    """Return how many pairs have the same tokens, and how fast the pairs diverge."""
    rows = [
        Row(
            metric="same_responses",
            stat=len(same) / len(responses) if len(responses) else math.nan,
            n_units=len(responses),
            method="share with all tokens the same",
        ),
        Row(
            metric="nonfinite", stat=float(nonfinite), n_units=len(same), method=f"responses, {column}; left out below"
        ),
    ]
    if not len(responses):
        return rows
    divergence = hazard(responses["compared"].to_numpy(np.int64), responses["diverged"].to_numpy(bool))
    speed = Row(
        metric="divergence_hazard",
        stat=divergence.rate,
        n_units=len(responses),
        method="first other tokens per token; exact Poisson interval",
        ci_lo=divergence.low,
        ci_hi=divergence.high,
    )
    return [*rows, speed]


def _delta_rows(
    compared: pd.DataFrame, rng: np.random.Generator, column: str, margin: float, alpha: float
) -> list[Row]:
    """Return bits, delta and |delta| of the pairs with the same tokens and finite log-probs, at least one."""
    count, lengths = len(compared), compared["compared"].to_numpy(np.int64)
    deltas, absolute = (compared[name].to_numpy(np.float64) for name in ("delta_sum", "abs_sum"))
    test = significance.sign_flip(deltas / lengths, rng)
    bitwise = Row(
        metric=f"{column}.bitwise",
        stat=float((compared["unequal"] == 0).mean()),
        n_units=count,
        method="share of them with all bits equal",
    )
    differs = Row(
        metric=f"{column}.delta",
        stat=test.stat,
        n_units=count,
        method=f"mean of responses; {test.relabellings} sign changes{' (all)' if test.exact else ''}",
        claim="difference",
        p_value=test.p_value,
    )
    return [
        bitwise,
        differs,
        _token_mean(f"{column}.delta", deltas, lengths, alpha),
        _equivalence_row(f"{column}.abs_delta", absolute / lengths, margin, alpha),
        _token_mean(f"{column}.abs_delta", absolute, lengths, alpha),
    ]


def _equivalence_row(metric: str, sizes: Floats, margin: float, alpha: float) -> Row:
    """Test by two one-sided t-tests whether the mean is below the margin."""
    size = significance.one_sample(sizes)
    low, high = significance.t_interval(size, 1 - 2 * alpha)
    return Row(
        metric=metric,
        stat=size.mean,
        n_units=len(sizes),
        method="mean of responses; TOST",
        claim="equivalence",
        p_value=significance.tost(size, margin),
        ci_lo=low,
        ci_hi=high,
        margin=margin,
    )


def _token_mean(metric: str, sums: Floats, lengths: npt.NDArray[np.int64], alpha: float) -> Row:
    """Return the mean over tokens, from the sums and lengths of the responses."""
    value, se = ratio_of_sums(sums, lengths.astype(np.float64))
    low, high = significance.t_interval(significance.Estimate(value, se, len(sums) - 1), 1 - alpha)
    return Row(
        metric=metric, stat=value, n_units=len(sums), method="token mean; clustered by response", ci_lo=low, ci_hi=high
    )


def distribution_rows(
    run_a: Path | str, run_b: Path | str, iterations: Sequence[int] | None, rng: np.random.Generator
) -> list[Row]:
    """Compare scores and lengths of all responses (b - a) by a sign-flip test, or Welch's t-test if no pair exists.

    Args:
        iterations: the iterations to compare; None for all.
        rng: draws sign changes.

    Returns:
        The rows of the level `distribution` for `run_compare`.

    Raises:
        UserError: damaged records.
    """
    names = ["iteration", "sequence", "prompt_key", "scores", "response_length"]
    a, b = (reader.read_sequences(run, iterations=iterations, columns=names) for run in (run_a, run_b))
    pairs, rows = a.merge(b, on=names[:3], suffixes=("_a", "_b"), validate="one_to_one"), []
    for name in names[3:]:
        columns = (pairs[f"{name}_a"], pairs[f"{name}_b"]) if len(pairs) else (a[name], b[name])
        x, y = (values.to_numpy(np.float64) for values in columns)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            # a test without these values would compare only a part of the responses
            missing = "values are not finite"
            rows.append(Row(metric=name, stat=math.nan, n_units=len(x) + len(y), method=missing, claim="difference"))
        elif len(pairs):
            rows.append(_paired_row(name, y - x, rng))
        else:
            rows.append(_welch_row(name, x, y))
    return rows


def _paired_row(metric: str, differences: Floats, rng: np.random.Generator) -> Row:
    """Test the differences of pairs by sign changes."""
    test = significance.sign_flip(differences, rng)
    return Row(
        metric=metric,
        stat=test.stat,
        n_units=len(differences),
        method=f"mean of pairs; {test.relabellings} sign changes",
        claim="difference",
        p_value=test.p_value,
    )


def _welch_row(metric: str, a: Floats, b: Floats) -> Row:
    """Test the difference of the means of two samples by Welch's t."""
    estimate = significance.welch(a, b)
    return Row(
        metric=metric,
        stat=estimate.mean,
        n_units=len(a) + len(b),
        method="Welch's t",
        claim="difference",
        p_value=significance.t_test(estimate),
    )


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
        column: the log-probs to compare, one of COLUMNS.
        iterations: iterations for the levels numeric and distribution; None for all.

    Returns:
        The table of `run_compare`.

    Raises:
        UserError: a margin or alpha out of range, or records that are missing, unknown or damaged.
    """
    if not 0 < margin < math.inf or not 0 < alpha < 0.5:
        raise UserError(f"margin = {margin}, alpha = {alpha}: margin is positive, alpha between 0 and 0.5")
    responses = paired_responses(run_a, run_b, column=column, iterations=iterations)
    levels: dict[Level, list[Row]] = {
        "bitwise": [_bitwise_row(run_a, run_b)],
        "numeric": numeric_rows(responses, rng, column=column, margin=margin, alpha=alpha),
        "distribution": distribution_rows(run_a, run_b, iterations, rng),
        "outcome": _final_rows(run_a, run_b),
    }
    return run_compare(str(run_a), str(run_b), levels, alpha)


def _bitwise_row(run_a: Path | str, run_b: Path | str) -> Row:
    """Compare the fingerprints; if they differ, the verdict names the first difference."""
    a, b = manifests(run_a, run_b)
    same, verdict = a.fingerprint == b.fingerprint, "identical"
    if not same:
        first = first_difference(run_a, run_b)
        verdict = f"different: {first.describe()}" if first else "different"
    return Row(
        metric="fingerprint",
        stat=float(same),
        n_units=max(len(a.iterations), len(b.iterations)),
        method="SHA-256 of all values",
        verdict=verdict,
    )


def _final_rows(run_a: Path | str, run_b: Path | str) -> list[Row]:
    """Return the difference of each final result that both runs have."""
    a, b = (recorded.final for recorded in manifests(run_a, run_b))
    pairs = {name: (value, b.get(name)) for name, value in a.items()}
    return [
        Row(
            metric=f"final.{name}",
            stat=float(y) - float(x),
            n_units=1,
            method="difference b - a of one run each: seeds decide, see `ppo-repro analyse table`",
            verdict="one seed",
        )
        for name, (x, y) in pairs.items()
        if not isinstance(x, str) and y is not None and not isinstance(y, str)
    ]
