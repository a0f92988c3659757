"""Pair the responses of two runs to the same prompts, and compare the log-probs of their tokens.

A pair is two responses to the same prompt at the same place of the same iteration. delta = log-prob of b - log-prob of
a, over the pairs whose tokens are all the same. After the runs have diverged, likely responses agree more often, so
delta does not describe all responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from ppo_repro.analysis import significance
from ppo_repro.analysis.comparison.findings import Finding
from ppo_repro.analysis.run_tables import RunTables, chosen_iterations
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.logprob_pairs import KEY_IN_ITERATION
from ppo_repro.records.manifest import Manifest, require_responses
from ppo_repro.statistics.bits import unequal_bits
from ppo_repro.statistics.clusters import Floats, ratio_of_sums, segment_sums

LOGPROB_COLUMNS = ("old_logprobs", "rollout_logprobs", "ref_logprobs")


class ResponsePair(NamedTuple):
    """Two responses to the same prompt: a row of `paired_responses`."""

    iteration: int
    sequence: int
    compared: int  # tokens up to and including the first different token, or all tokens
    diverged: bool  # a token differs
    delta_sum: float  # of delta over the tokens, nats; NaN for a pair that diverged
    abs_sum: float  # of |delta| over the tokens, nats; NaN for a pair that diverged
    unequal: int  # tokens whose log-probs differ in any bit; 0 for a pair that diverged


class Hazard(NamedTuple):
    """First differences per compared token, with the exact 95 % Poisson interval [low, high]."""

    rate: float
    low: float
    high: float


def manifests(run_a: Path | str, run_b: Path | str) -> tuple[Manifest, Manifest]:
    """Return both manifests. Raises UserError if a run is incomplete or damaged, or if the kinds differ."""
    a, b = (reader.open_manifest(run) for run in (run_a, run_b))
    if a.kind != b.kind:
        raise UserError(f"{run_a} is a {a.kind} run, {run_b} a {b.kind} run; compare runs of one kind")
    return a, b


def paired_responses(
    run_a: Path | str,
    run_b: Path | str,
    *,
    column: str = "old_logprobs",
    iterations: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Return a `ResponsePair` for each pair of responses to the same prompt in two runs.

    Args:
        column: the log-probs to compare, one of LOGPROB_COLUMNS.
        iterations: the iterations to compare; None for all.

    Raises:
        UserError: another column, runs without responses, damaged records, or, without `iterations`, different
            numbers of iterations.
    """
    if column not in LOGPROB_COLUMNS:
        raise UserError(f"column = {column!r}: must be {', '.join(LOGPROB_COLUMNS)}")
    a, b = manifests(run_a, run_b)
    require_responses(run_a, a)
    selected, others = chosen_iterations(a, iterations), chosen_iterations(b, iterations)
    if len(selected) != len(others):
        raise UserError(
            f"{run_a} has {len(selected)} iterations, {run_b} has {len(others)}; name the iterations to compare"
        )
    runs = RunTables(run_a, a, selected), RunTables(run_b, b, others)
    return pd.concat([_iteration_pairs(runs, column, iteration) for iteration in selected], ignore_index=True)


def _iteration_pairs(runs: Sequence[RunTables], column: str, iteration: int) -> pd.DataFrame:
    """Return the rows of `paired_responses` of one iteration."""
    responses = _merged(runs, "sequences", iteration, ["sequence"], ["prompt_ids", "response_length"])
    prompts = zip(responses["prompt_ids_a"], responses["prompt_ids_b"], strict=True)
    has_same_prompt = np.array([np.array_equal(prompt_a, prompt_b) for prompt_a, prompt_b in prompts], bool)
    tokens = _merged(runs, "tokens", iteration, KEY_IN_ITERATION, ["token_id", column])
    pairs = responses[has_same_prompt].merge(_sums_by_response(tokens, column), on="sequence")

    different = tokens[tokens["token_id_a"] != tokens["token_id_b"]]
    first = pairs["sequence"].map(different.groupby("sequence")["position"].min()).to_numpy(np.float64)
    lengths = pairs[["response_length_a", "response_length_b"]].to_numpy(np.int64)
    # if a limit cut one response short, the first different token is the token after it
    is_cut = lengths[:, 0] != lengths[:, 1]
    has_different_token = ~np.isnan(first)
    diverged = has_different_token | is_cut
    compared = np.where(has_different_token, np.nan_to_num(first) + 1, lengths.min(axis=1) + is_cut)
    columns = {
        "iteration": np.full(len(pairs), iteration, np.int32),
        "sequence": pairs["sequence"].to_numpy(),
        "compared": compared.astype(np.int64),
        "diverged": diverged,
        "delta_sum": np.where(diverged, np.nan, pairs["delta"]),
        "abs_sum": np.where(diverged, np.nan, pairs["abs_delta"]),
        "unequal": np.where(diverged, 0, pairs["unequal"]).astype(np.int64),
    }
    return pd.DataFrame(columns, columns=ResponsePair._fields)


def _merged(runs: Sequence[RunTables], table: str, iteration: int, keys: list[str], columns: list[str]) -> pd.DataFrame:
    """Return the rows of a table that both runs have, with the columns of the runs as NAME_a and NAME_b."""
    a, b = (run.read(table, [*keys, *columns], iteration) for run in runs)
    return a.merge(b, on=keys, suffixes=("_a", "_b"), validate="one_to_one")


def _sums_by_response(tokens: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return a row per response: sums of delta and |delta|, and the number of log-probs that differ in any bit."""
    a, b = (tokens[f"{column}_{run}"].to_numpy(np.float32) for run in "ab")
    delta = b.astype(np.float64) - a.astype(np.float64)
    starts = np.flatnonzero(np.diff(tokens["sequence"], prepend=-1))
    # numpy, because pandas would skip NaN in sums
    return pd.DataFrame(
        {
            "sequence": tokens["sequence"].to_numpy()[starts],
            "delta": segment_sums(delta, starts),
            "abs_delta": segment_sums(np.abs(delta), starts),
            "unequal": segment_sums(unequal_bits(a, b).astype(np.float64), starts),
        }
    )


def numeric_findings(
    pairs: pd.DataFrame, rng: np.random.Generator, *, column: str, margin: float, alpha: float
) -> list[Finding]:
    """Return the findings of the level `numeric` for `findings_table`.

    Args:
        pairs: the frame of `paired_responses`.
        rng, column, margin, alpha: the arguments of `compare_runs`.
    """
    same = pairs[~pairs["diverged"]]
    is_finite = np.isfinite(same["abs_sum"].to_numpy(np.float64))
    findings = _divergence_findings(pairs, same, int((~is_finite).sum()), column)
    return [*findings, *_delta_findings(same[is_finite], rng, column, margin, alpha)] if is_finite.any() else findings


def _divergence_findings(pairs: pd.DataFrame, same: pd.DataFrame, nonfinite: int, column: str) -> list[Finding]:
    """Return how many pairs have the same tokens, and how fast the pairs diverge."""
    count = len(pairs)
    share = len(same) / count if count else math.nan
    findings = [
        Finding("same_responses", share, count, "share with all tokens the same"),
        Finding("n_nonfinite", float(nonfinite), len(same), f"responses, {column}; left out below"),
    ]
    if count:
        rate, low, high = hazard(pairs["compared"].to_numpy(np.int64), pairs["diverged"].to_numpy(bool))
        method = "first other tokens per token; exact Poisson interval"
        findings.append(Finding("divergence_hazard", rate, count, method, ci_lo=low, ci_hi=high))
    return findings


def hazard(compared: npt.NDArray[np.int64], diverged: npt.NDArray[np.bool_]) -> Hazard:
    """Return the hazard h = first differences / compared tokens.

    If h is the same at every position, a response of T tokens is identical with probability about exp(-h T).
    """
    exposure, count = int(compared.sum()), int(diverged.sum())
    low = float(stats.chi2.ppf(0.025, 2 * count)) / 2 if count else 0.0
    high = float(stats.chi2.isf(0.025, 2 * (count + 1))) / 2
    return Hazard(count / exposure, low / exposure, high / exposure)


def _delta_findings(
    pairs: pd.DataFrame, rng: np.random.Generator, column: str, margin: float, alpha: float
) -> list[Finding]:
    """Return bits, delta and |delta| of the pairs with the same tokens and finite log-probs, at least one."""
    count = len(pairs)
    lengths = pairs["compared"].to_numpy(np.int64)
    delta_sums, abs_sums = (pairs[name].to_numpy(np.float64) for name in ("delta_sum", "abs_sum"))
    equal = float((pairs["unequal"] == 0).mean())
    test = significance.sign_flip(delta_sums / lengths, rng)
    method = f"mean of responses; {test.relabellings} sign changes{' (all)' if test.exact else ''}"
    return [
        Finding(f"{column}.bitwise", equal, count, "share of them with all bits equal"),
        Finding(f"{column}.delta", test.stat, count, method, claim="difference", p_value=test.p_value),
        _token_mean(f"{column}.delta", delta_sums, lengths, alpha),
        _equivalence(f"{column}.abs_delta", abs_sums / lengths, margin, alpha),
        _token_mean(f"{column}.abs_delta", abs_sums, lengths, alpha),
    ]


def _equivalence(metric: str, response_means: Floats, margin: float, alpha: float) -> Finding:
    """Test by two one-sided t-tests whether the mean over responses is below the margin."""
    estimate = significance.one_sample(response_means)
    low, high = significance.t_interval(estimate, 1 - 2 * alpha)
    return Finding(
        metric,
        estimate.mean,
        len(response_means),
        "mean of responses; TOST",
        claim="equivalence",
        p_value=significance.tost(estimate, margin),
        ci_lo=low,
        ci_hi=high,
        margin=margin,
    )


def _token_mean(metric: str, sums: Floats, lengths: npt.NDArray[np.int64], alpha: float) -> Finding:
    """Return the mean over tokens, from the sums and lengths of the responses."""
    value, se = ratio_of_sums(sums, lengths.astype(np.float64))
    low, high = significance.t_interval(significance.Estimate(value, se, len(sums) - 1), 1 - alpha)
    return Finding(metric, value, len(sums), "token mean; clustered by response", ci_lo=low, ci_hi=high)
