"""What a stream of token pairs is reduced to: exact sums, counts and histograms that can be merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.mismatch.sequence import first_true
from analysis.mismatch.token import ULP_FLOOR, sequence_starts
from analysis.stats import exact_sums
from analysis.stats.exact_sums import ClusterSums, Extremes, Floats


@dataclass(frozen=True)
class MismatchSums:
    """Sums over sequences. `merge_sums` gives the same bits for every chunking that splits no sequence.

    `linear`, the histograms and all extremes but the last are over finite tokens (clusters: sequences);
    `weights` and log_ppl_diff are over the sequences whose tokens are all finite; `survival` counts, in every
    sequence, the tokens up to the first whose bits differ.
    """

    tokens: int
    sequences: int
    masked: int
    nonfinite: int
    exact_zero_a: int
    exact_zero_b: int
    linear: ClusterSums
    weights: ClusterSums
    survival: ClusterSums
    abs_counts: exact_sums.Ints
    ulp_counts: exact_sums.Ints
    delta: Extremes
    rho: Extremes
    prob_diff: Extremes
    ulp: Extremes
    log_ppl_diff: Extremes


def mismatch_sums(tokens: pd.DataFrame, masked: int = 0) -> MismatchSums:
    """The sums of `mismatch_token` rows of whole sequences; `masked` is how many tokens were dropped before."""
    starts = sequence_starts(tokens)
    lengths = np.diff(np.append(starts, len(tokens)))
    diverged = first_true(~tokens["bitwise_equal"].to_numpy(), starts)
    finite = tokens["finite"].to_numpy()
    finite_counts = _segments(finite.astype(np.float64), starts)
    finite_tokens = tokens if finite.all() else tokens[finite].reset_index(drop=True)
    finite_starts = sequence_starts(finite_tokens)
    counts = finite_counts[finite_counts > 0].astype(np.int64)
    linear = {name: _segments(values, finite_starts) for name, values in _columns(finite_tokens)}
    complete = (finite_counts == lengths)[finite_counts > 0]
    weights = _weights({name: y[complete] for name, y in linear.items()}, counts[complete])
    large_enough = np.minimum(np.abs(finite_tokens["logprobs_a"]), np.abs(finite_tokens["logprobs_b"])) > ULP_FLOOR
    ulp = finite_tokens["ulp"].to_numpy()[large_enough.to_numpy()].astype(np.float64)
    return MismatchSums(
        tokens=len(tokens),
        sequences=len(starts),
        masked=masked,
        nonfinite=len(tokens) - len(finite_tokens),
        exact_zero_a=int((tokens["logprobs_a"] == 0).sum()),
        exact_zero_b=int((tokens["logprobs_b"] == 0).sum()),
        linear=exact_sums.cluster_sums(linear, counts),
        weights=exact_sums.cluster_sums(weights, np.ones(int(complete.sum()), np.int64)),
        survival=exact_sums.cluster_sums(
            {"hazard": (diverged >= 0).astype(np.float64)}, np.where(diverged < 0, lengths, diverged + 1)
        ),
        abs_counts=exact_sums.histogram(finite_tokens["abs_delta"].to_numpy()),
        ulp_counts=exact_sums.histogram(ulp),
        delta=exact_sums.extremes(finite_tokens["delta"].to_numpy()),
        rho=exact_sums.extremes(finite_tokens["rho"].to_numpy()),
        prob_diff=exact_sums.extremes(finite_tokens["prob_diff"].to_numpy()),
        ulp=exact_sums.extremes(ulp),
        log_ppl_diff=exact_sums.extremes(weights["log_ppl_diff"]),
    )


def merge_sums(a: MismatchSums, b: MismatchSums) -> MismatchSums:
    """The sums over the sequences of both."""
    return MismatchSums(
        tokens=a.tokens + b.tokens,
        sequences=a.sequences + b.sequences,
        masked=a.masked + b.masked,
        nonfinite=a.nonfinite + b.nonfinite,
        exact_zero_a=a.exact_zero_a + b.exact_zero_a,
        exact_zero_b=a.exact_zero_b + b.exact_zero_b,
        linear=exact_sums.merge_clusters(a.linear, b.linear),
        weights=exact_sums.merge_clusters(a.weights, b.weights),
        survival=exact_sums.merge_clusters(a.survival, b.survival),
        abs_counts=a.abs_counts + b.abs_counts,
        ulp_counts=a.ulp_counts + b.ulp_counts,
        delta=exact_sums.merge_extremes(a.delta, b.delta),
        rho=exact_sums.merge_extremes(a.rho, b.rho),
        prob_diff=exact_sums.merge_extremes(a.prob_diff, b.prob_diff),
        ulp=exact_sums.merge_extremes(a.ulp, b.ulp),
        log_ppl_diff=exact_sums.merge_extremes(a.log_ppl_diff, b.log_ppl_diff),
    )


def _segments(values: Floats, starts: npt.NDArray[np.intp]) -> Floats:
    return np.add.reduceat(values, starts) if len(starts) else np.zeros(0)


def _columns(tokens: pd.DataFrame) -> Iterator[tuple[str, Floats]]:
    """The quantities summed over tokens. x = rho - 1 keeps digits that rho itself would lose near 1."""
    delta, k3 = tokens["delta"].to_numpy(), tokens["k3"].to_numpy()
    logp_a = tokens["logprobs_a"].to_numpy().astype(np.float64)
    logp_b = tokens["logprobs_b"].to_numpy().astype(np.float64)
    prob_a, prob_diff, rho = np.exp(logp_a), tokens["prob_diff"].to_numpy(), tokens["rho"].to_numpy()
    yield "equal", tokens["bitwise_equal"].to_numpy().astype(np.float64)
    yield "abs", tokens["abs_delta"].to_numpy()
    yield "k1", -delta
    yield "k2", tokens["k2"].to_numpy()
    yield "k3", k3
    yield "one_sided", (delta <= 0).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.expm1(delta)
        yield "x", x
        yield "x_sq", x * x
        yield "tv", 0.5 * np.abs(x)
        yield "mult_err", np.exp(np.abs(delta))
        yield "kl_pg", rho * delta
        # rho delta - (rho - 1) in a form that is never negative
        yield "kl_pg_nonneg", rho * (np.expm1(-delta) + delta)
    yield "prob_abs", np.abs(prob_diff)
    yield "prob_diff", prob_diff
    yield "prob_diff_sq", prob_diff * prob_diff
    yield "prob_a", prob_a
    yield "prob_a_sq", prob_a * prob_a
    yield "prob_cross", prob_diff * (2.0 * prob_a + prob_diff)
    yield "logp_a", logp_a
    yield "logp_b", logp_b
    yield "logp_a_sq", logp_a * logp_a
    yield "logp_cross", delta * (logp_a + logp_b)
    yield "delta_logp_a", delta * logp_a


def _weights(sums: dict[str, Floats], counts: exact_sums.Ints) -> dict[str, Floats]:
    """The quantities averaged over sequences, each with the same weight."""
    log_rho = -sums["k1"]
    log_ppl_a, log_ppl_b = -sums["logp_a"] / counts, -sums["logp_b"] / counts
    log_ppl_diff = sums["k1"] / counts
    with np.errstate(over="ignore"):
        x = np.expm1(log_rho)
        return {
            "log_rho_seq": log_rho,
            "x_seq": x,
            "x_seq_sq": x * x,
            "rho_geo": np.exp(-log_ppl_diff),
            "ppl_ratio": np.exp(log_ppl_diff),
            "ppl_a": np.exp(log_ppl_a),
            "ppl_b": np.exp(log_ppl_b),
            "log_ppl_a": log_ppl_a,
            "log_ppl_b": log_ppl_b,
            "log_ppl_diff": log_ppl_diff,
            "log_ppl_abs_diff": np.abs(log_ppl_diff),
        }
