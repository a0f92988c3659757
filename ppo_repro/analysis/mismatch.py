"""Do two log-probs of the same token agree? Tables for a run or for dumps of other stacks.

`ppo-repro analyse mismatch RUN` prints the summary of a run; `--columns PRESET` reads dumped files instead,
and `--remedies` prints what truncation, masking and rejection would have done. Only one iteration's tokens are in
memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis import clusters
from ppo_repro.analysis.buckets import DOUBLING, ENTROPIES, PROBABILITIES, bucket_of
from ppo_repro.analysis.clusters import Floats, Ratio
from ppo_repro.analysis.pairs import (
    LAG,
    NO_TOKEN,
    PAIRS,
    ROUTE,
    ROUTES,
    TURN,
    imported_pairs,
    iteration_of,
    masked_tokens,
    run_pairs,
)
from ppo_repro.analysis.remedies import remedy_table
from ppo_repro.base.errors import UserError
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import Parser, tell
from ppo_repro.statistics.bits import has_steps
from ppo_repro.statistics.kl import k1, k3
from ppo_repro.testing.dumps import FORMATS
from ppo_repro.testing.pairs import with_mismatch

# token means with a standard error clustered by response
TOKEN_MEANS = ("frac_bitwise_equal", "abs_mean", "prob_abs_mean", "k1", "k3", "kl_pg_nonneg", "tv", "rho_mean")
# edges of the buckets of each kind, in its unit
BUCKET_EDGES = {
    "prob": PROBABILITIES,
    "entropy": ENTROPIES,
    "position": DOUBLING,
    "seq_len": DOUBLING,
    LAG: DOUBLING,
    TURN: DOUBLING,
    ROUTE: tuple(float(index) for index in range(len(ROUTES) + 1)),
}
_BUCKET_MEANS = ["abs_mean", "prob_abs_mean", "k1", "k3", "frac_eq"]
_BUCKET_SUMS = ["n", *_BUCKET_MEANS]
BUCKET_COLUMNS = ["kind", "lo", "hi", "n", "abs_p99", "abs_max", *_BUCKET_MEANS]
_BUCKET_KEYS = ["kind", "bucket", "bin"]


class Estimate(NamedTuple):
    """A metric by one reduction: a row of `update_table`."""

    metric: str
    reduction: str
    value: float
    se: float = math.nan  # NaN: the reduction has none


@dataclass(frozen=True)
class Sums:
    """Sums over tokens: one row per response, and the counts of |delta| and of ULPs in each bin of `log_bins`.

    Columns of `sequences`: length, finite (tokens with two finite log-probs), diverged (whether any bit differs), and
    over the finite tokens the sums, smallest and largest values.
    """

    sequences: pd.DataFrame
    abs_counts: pd.Series
    ulp_counts: pd.Series
    masked: int


# the metrics


def sums_of(tokens: pd.DataFrame, masked: int = 0) -> Sums:
    """Sum `with_mismatch` rows of whole responses; `masked` counts the tokens that a mask removed before."""
    starts = clusters.sequence_starts(tokens)
    finite = tokens["finite"].to_numpy()
    a, b = (tokens[name].to_numpy().astype(np.float64) for name in ("logprobs_a", "logprobs_b"))
    rows = {
        "length": np.diff(np.append(starts, len(tokens))),
        "finite": clusters.segment_sums(finite.astype(float), starts),
    }
    rows["diverged"] = clusters.segment_sums((~tokens["bitwise_equal"].to_numpy()).astype(float), starts) > 0
    for name, values in quantities(tokens).items():
        rows[name] = clusters.segment_sums(np.where(finite, values, 0.0), starts)
    large = finite & has_steps(a, b)
    ulp = tokens["ulp"].to_numpy().astype(np.float64)
    for name, values, where in (
        ("rho", tokens["rho"].to_numpy(), finite),
        ("abs", tokens["abs_delta"].to_numpy(), finite),
        ("prob", np.abs(tokens["prob_diff"].to_numpy()), finite),
        ("ulp", ulp, large),
    ):
        for side, ufunc, nothing in (("min", np.minimum, math.inf), ("max", np.maximum, -math.inf)):
            chosen = np.where(where, values, nothing)
            rows[f"{name}_{side}"] = ufunc.reduceat(chosen, starts) if len(starts) else np.zeros(0)
    return Sums(pd.DataFrame(rows), _binned(tokens["abs_delta"].to_numpy()[finite]), _binned(ulp[large]), masked)


def quantities(tokens: pd.DataFrame) -> dict[str, Floats]:
    """Return each quantity of `with_mismatch` rows whose mean is a metric, float64 [N], by the name of the metric.

    x = rho - 1 keeps digits that rho would lose near 1.
    """
    delta, rho, prob_diff = (tokens[name].to_numpy() for name in ("delta", "rho", "prob_diff"))
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.expm1(delta)
        return {
            "frac_bitwise_equal": tokens["bitwise_equal"].to_numpy().astype(np.float64),
            "abs_mean": tokens["abs_delta"].to_numpy(),
            "prob_abs_mean": np.abs(prob_diff),
            "k1": k1(delta),
            "k3": tokens["k3"].to_numpy(),
            # rho delta - (rho - 1) in a form that is never negative
            "kl_pg_nonneg": rho * k3(-delta),
            "tv": 0.5 * np.abs(x),
            "x": x,
            "x_sq": x * x,
        }


def _binned(values: Floats) -> pd.Series:
    return pd.Series(clusters.log_bins(values)).value_counts().sort_index()


def merged(parts: Sequence[Sums]) -> Sums:
    """Return the sums over the responses of all parts. Raises UserError if there is no part."""
    if not parts:
        raise UserError(NO_TOKEN)
    counts = [
        pd.concat([getattr(part, name) for part in parts]).groupby(level=0).sum()
        for name in ("abs_counts", "ulp_counts")
    ]
    sequences = pd.concat([part.sequences for part in parts], ignore_index=True)
    return Sums(sequences, counts[0], counts[1], sum(part.masked for part in parts))


def update_table(sums: Sums) -> pd.DataFrame:
    """Return one row per metric and reduction: metric, reduction, value, se (float64), tokens, sequences (int64).

    With delta = logprobs_b - logprobs_a, rho = exp(delta) and tokens drawn from a, these estimates have no bias:

        KL(a || b): k1 = E[-delta] and k3 = E[rho - 1 - delta]
        KL(b || a): kl_pg_nonneg = E[rho delta - rho + 1]
        total variation: tv = E|rho - 1| / 2
        chi^2(b || a): chi2_seq = E[product of rho over a response, squared] - 1, which may be negative in a sample

    The effective sample size is ess_frac = 1 / (1 + Var(rho) / E[rho]^2). The reductions are

        token_mean: mean over tokens, with se
        seq_mean_token_sum, seq_mean: mean over responses of a sum, or of another number of the response, with se
        token, seq: moments, quantiles (relative error 2**-8) and extremes of tokens or responses, without se
        count: a number of tokens

    n_nonfinite counts tokens that are not finite. No metric includes these tokens; seq_mean and seq also leave out
    their responses.
    """
    some = sums.sequences[sums.sequences["finite"] > 0]
    whole = sums.sequences[sums.sequences["finite"] == sums.sequences["length"]]
    rows = [*_means_over_tokens(some), *_of_tokens(sums, some), *_of_responses(whole), *_counts(sums)]
    table = pd.DataFrame(rows, columns=Estimate._fields)
    table["tokens"] = int(some["finite"].sum())
    table["sequences"] = np.where(table["reduction"].isin(["seq_mean", "seq"]), len(whole), len(some))
    return table


def _means_over_tokens(some: pd.DataFrame) -> list[Estimate]:
    """Return the metrics that have a standard error clustered by response, from the rows with a finite token."""
    n, rows = some["finite"].to_numpy(), list[Estimate]()
    for metric in TOKEN_MEANS:
        values = some["x" if metric == "rho_mean" else metric].to_numpy()
        value, se = clusters.ratio_of_sums(values, n)
        rows.append(Estimate(metric, "token_mean", 1.0 + value if metric == "rho_mean" else value, se))
    return [*rows, Estimate("k3", "seq_mean_token_sum", *clusters.mean(some["k3"].to_numpy()))]


def _of_tokens(sums: Sums, some: pd.DataFrame) -> list[Estimate]:
    """Return effective sample size, extremes and quantiles of tokens."""
    seq, n = sums.sequences, some["finite"].to_numpy()
    _, ess = weight_moments(*(clusters.ratio_of_sums(some[name].to_numpy(), n) for name in ("x", "x_sq")))
    largest = {name: _largest(seq[f"{name}_max"]) for name in ("abs", "prob", "ulp", "rho")}
    values = {
        "ess_frac": ess, "rho_max": largest["rho"],
        "rho_min": -_largest(-seq["rho_min"]), "abs_max": largest["abs"], "prob_abs_max": largest["prob"],
        "ulp_max": largest["ulp"],
        # the middle of the last bin may lie above the largest value; below 256 every integer has a bin of its own
        "abs_p99": min(clusters.quantile(sums.abs_counts, 0.99), largest["abs"]),
        "ulp_p99": float(np.floor(clusters.quantile(sums.ulp_counts, 0.99))),
    }  # fmt: skip
    return [Estimate(metric, "token", value) for metric, value in values.items()]


def _of_responses(whole: pd.DataFrame) -> list[Estimate]:
    """Return the metrics of whole responses, from the rows without a token that is not finite."""
    log_rho = -whole["k1"].to_numpy()
    with np.errstate(over="ignore"):
        x = np.expm1(log_rho)
        chi2, ess = weight_moments(clusters.mean(x), clusters.mean(x**2))
    return [
        Estimate("log_ppl_abs_diff", "seq_mean", *clusters.mean(np.abs(log_rho) / whole["length"])),
        Estimate("chi2_seq", "seq", chi2),
        Estimate("ess_seq", "seq", ess),
        Estimate("frac_diverged", "seq", clusters.mean(whole["diverged"].to_numpy(float)).value),
    ]


def _counts(sums: Sums) -> list[Estimate]:
    length, finite = sums.sequences["length"].sum(), sums.sequences["finite"].sum()
    counts = {"n_tokens": length, "n_masked": sums.masked, "n_nonfinite": length - finite}
    return [Estimate(metric, "count", float(count)) for metric, count in counts.items()]


def _largest(values: pd.Series) -> float:
    """Return the largest value; NaN without a value."""
    largest = float(values.max()) if len(values) else -math.inf
    return math.nan if largest == -math.inf else largest


def weight_moments(x: Ratio, x_sq: Ratio) -> tuple[float, float]:
    """Return chi2 = E[w^2] - 1 and ESS / N = 1 / (1 + Var(w) / E[w]^2) of w = 1 + x, from the means of x and x^2.

    ESS / N is NaN if a square is beyond float64.
    """
    if not math.isfinite(x_sq.value) or x.value <= -1.0:
        return 2.0 * x.value + x_sq.value, math.nan
    # rounding may make a variance of zero negative
    variance = max(x_sq.value - x.value**2, 0.0)
    return 2.0 * x.value + x_sq.value, 1.0 / (1.0 + variance / (1.0 + x.value) ** 2)


# by bucket: noise in logits moves log p by about 1 - p, and p by about p (1 - p), so that differences of log-probs are
# largest for rare tokens, and differences of probabilities for p between 0.1 and 0.9; both are computed


def bucket_sums(tokens: pd.DataFrame) -> pd.DataFrame:
    """Sum `with_mismatch` rows of whole responses by kind, bucket and bin of |delta|, over finite tokens.

    `bucket_table` merges the frames of several iterations.
    """
    lengths = np.diff(np.append(clusters.sequence_starts(tokens), len(tokens)))
    columns = {
        "prob": np.exp(tokens["logprobs_a"].to_numpy().astype(np.float64)),
        "seq_len": np.repeat(lengths, lengths).astype(np.float64),
        **{
            name: tokens[name].to_numpy().astype(np.float64)
            for name in ("position", LAG, TURN, ROUTE)
            if name in tokens
        },
    }
    if "entropies" in tokens:
        columns["entropy"] = tokens["entropies"].to_numpy().astype(np.float64)
    size, means = tokens["abs_delta"].to_numpy(), quantities(tokens)
    means["frac_eq"] = means["frac_bitwise_equal"]
    summed = pd.DataFrame(
        {"bin": clusters.log_bins(size), "abs_max": size, "n": 1, **{name: means[name] for name in _BUCKET_MEANS}}
    )
    frames = []
    for kind, values in columns.items():
        placed = summed.assign(kind=kind, bucket=bucket_of(values, BUCKET_EDGES[kind]))
        frames.append(_added([placed[tokens["finite"].to_numpy() & (placed["bucket"] >= 0)]]))
    return pd.concat(frames, ignore_index=True)


def _added(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    groups = pd.concat(parts, ignore_index=True).groupby(_BUCKET_KEYS, sort=True)
    return groups[_BUCKET_SUMS].sum().assign(abs_max=groups["abs_max"].max()).reset_index()


def bucket_table(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return one row per kind and bucket that has tokens, from frames of `bucket_sums`.

    The table has no rows of a kind if the source lacks its column. The columns are

        kind, lo, hi: the bucket [lo, hi) in the unit of the kind
        n: number of tokens
        abs_p99, abs_max, abs_mean: |delta| in nats; the percentile has a relative error of 2**-8
        prob_abs_mean: mean |difference of probabilities|
        k1, k3: KL(a || b), nats, token mean
        frac_eq: share of tokens with equal bits
    """
    sums = _added(parts)
    rows = []
    for kind, edges in BUCKET_EDGES.items():
        for place, group in sums[sums["kind"] == kind].groupby("bucket"):
            bucket = int(str(place))
            n, largest = int(group["n"].sum()), float(group["abs_max"].max())
            means = {name: float(group[name].sum()) / n for name in _BUCKET_MEANS}
            # the middle of the last bin may lie above the largest value
            p99 = min(clusters.quantile(group.set_index("bin")["n"], 0.99), largest)
            numbers = {"lo": edges[bucket], "hi": edges[bucket + 1], "abs_p99": p99, "abs_max": largest, **means}
            rows.append({"kind": kind, "n": n, **numbers})
    return pd.DataFrame(rows, columns=BUCKET_COLUMNS)


# the tables of a run, and the command


class Shown(NamedTuple):
    """A row of the summary."""

    metric: str
    reduction: str
    ideal: float | None
    meaning: str = ""


IMPORTANT = (
    Shown("n_tokens", "count", None, "tokens compared"),
    Shown("n_masked", "count", None, "tokens that a mask removed"),
    Shown("n_nonfinite", "count", 0.0, "tokens with an infinite or NaN log-prob, left out below"),
    Shown("frac_bitwise_equal", "token_mean", 1.0, "log-probs equal in every bit"),
    Shown("frac_diverged", "seq", 0.0, "responses with an unequal token"),
    Shown("ulp_p99", "token", 0.0, "float32 steps between the two, where |log-prob| > 0.01"),
    Shown("ulp_max", "token", 0.0),
    Shown("abs_mean", "token_mean", 0.0, "|delta|, nats; delta = b - a"),
    Shown("abs_p99", "token", 0.0),
    Shown("abs_max", "token", 0.0),
    Shown("prob_abs_mean", "token_mean", 0.0, "difference of probabilities"),
    Shown("prob_abs_max", "token", 0.0),
    Shown("k1", "token_mean", 0.0, "KL(a || b), nats per token, signed estimator"),
    Shown("k3", "token_mean", 0.0, "KL(a || b), nats per token, never negative"),
    Shown("k3", "seq_mean_token_sum", 0.0, "KL(a || b), nats per response"),
    Shown("kl_pg_nonneg", "token_mean", 0.0, "KL(b || a), nats per token"),
    Shown("tv", "token_mean", 0.0, "total variation"),
    Shown("rho_mean", "token_mean", 1.0, "mean of rho = exp(delta)"),
    Shown("rho_min", "token", 1.0),
    Shown("rho_max", "token", 1.0),
    Shown("ess_frac", "token", 1.0, "effective sample size of the weights rho, share of tokens"),
    Shown("ess_seq", "seq", 1.0, "the same of products over responses, share of responses"),
    Shown("chi2_seq", "seq", 0.0, "chi-squared of products over responses"),
    Shown("log_ppl_abs_diff", "seq_mean", 0.0, "|log perplexity difference| of a response"),
)


@dataclass(frozen=True)
class Measured:
    """Sums of one iteration; `merged` and `update_table` take `mismatch`, `bucket_table` takes `buckets`."""

    iteration: int
    mismatch: Sums
    buckets: pd.DataFrame


@dataclass(frozen=True)
class Tables:
    """Tables of `update_table` and `bucket_table` over all iterations; the first column is the iteration."""

    update: pd.DataFrame
    bucket: pd.DataFrame


def measure(pairs: Iterable[pd.DataFrame]) -> Iterator[Measured]:
    """Yield the sums of each chunk of pairs (`run_pairs`). Raises UserError if a chunk cannot be read."""
    for chunk in pairs:
        tokens = with_mismatch(chunk)
        yield Measured(iteration_of(chunk), sums_of(tokens, masked_tokens(chunk)), bucket_sums(tokens))


def tables(measured: Iterable[Measured]) -> Tables:
    """Return the tables of all iterations. Raises UserError if there is no token."""
    parts = list(measured)
    if not parts:
        raise UserError(NO_TOKEN)
    update = pd.concat([update_table(sums.mismatch).assign(iteration=sums.iteration) for sums in parts])
    bucket = pd.concat([bucket_table([sums.buckets]).assign(iteration=sums.iteration) for sums in parts])
    return Tables(*(table.set_index("iteration").reset_index() for table in (update, bucket)))


def summary_of(pairs: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Return the most important metrics of some pairs beside their ideal values.

    Columns: metric, reduction, value, se (clustered by response, NaN if undefined), ideal, meaning. KL and differences
    of log-probs are in nats. Raises UserError if there is no token.
    """
    parts = [sums_of(with_mismatch(chunk), masked_tokens(chunk)) for chunk in pairs]
    metrics = update_table(merged(parts)).set_index(["metric", "reduction"])
    rows = [
        (row.metric, row.reduction, *metrics.loc[(row.metric, row.reduction), ["value", "se"]], row.ideal, row.meaning)
        for row in IMPORTANT
    ]
    table = pd.DataFrame(rows, columns=["metric", "reduction", "value", "se", "ideal", "meaning"])
    return table.astype({"value": "float64", "se": "float64", "ideal": "float64"})


def main(argv: Sequence[str]) -> None:
    """Print the summary or the remedies."""
    parser = Parser(prog="ppo-repro analyse mismatch", description="Do two log-probs agree?")
    parser.add_argument("paths", nargs="+", type=run_named, help="a run, or files with --columns")
    parser.add_argument("--pair", choices=PAIRS, help=f"which log-probs of one run ({PAIRS[0]})")
    parser.add_argument("--columns", choices=FORMATS, help="the stack whose column names the files have")
    parser.add_argument("--remedies", action="store_true", help="what each published remedy would have done instead")
    arguments = parser.parse_args(argv)
    pairs = _chosen_pairs(arguments.paths, arguments.pair, arguments.columns)
    table = remedy_table(pairs) if arguments.remedies else summary_of(pairs)
    tell(table.to_string(index=False, na_rep="", float_format=lambda x: f"{x:.6g}"))


def _chosen_pairs(paths: Sequence[Path], pair: str | None, columns: str | None) -> Iterator[pd.DataFrame]:
    """Return the pairs to compare. Raises UserError for an option that would change nothing."""
    if columns is not None:
        if pair is not None:
            raise UserError(f"--pair {pair}: is for recorded runs, --columns for files of other stacks; leave one out")
        return imported_pairs(paths, columns)
    if len(paths) > 1:
        raise UserError(
            f"{len(paths)} paths: give one run, or files with --columns; `ppo-repro analyse compare` takes two runs"
        )
    return run_pairs(paths[0], pair or PAIRS[0])
