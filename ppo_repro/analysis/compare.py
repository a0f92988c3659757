"""Are two runs the same? `ppo-repro analyse compare A B --seed 0` asks four nested questions, with a verdict on each.

The level `bitwise` compares every recorded bit, `numeric` the log-probs of the same tokens, `distribution` scores and
lengths, and `outcome` the final results.

A pair is two responses to the same prompt at the same place of the same iteration. delta = log-prob of b - log-prob of
a, over the pairs whose tokens are all the same. After the runs have diverged, likely responses agree more often, so
delta does not describe all responses.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from ppo_repro.analysis import significance
from ppo_repro.analysis.clusters import ratio_of_sums, segment_sums
from ppo_repro.analysis.pairs import chosen_iterations
from ppo_repro.analysis.significance import Floats, holm
from ppo_repro.base.errors import UserError
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import Parser, tell
from ppo_repro.records import reader
from ppo_repro.records.diff import first_difference
from ppo_repro.records.grid import GRID
from ppo_repro.records.manifest import Manifest, require_responses
from ppo_repro.statistics.bits import unequal_bits

COLUMNS = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
_KEY = ["sequence", "position"]
# nats of mean |delta|; a smaller difference of two float32 forwards is rounding
MARGIN = 1e-3
SHOWN = ["metric", "stat", "ci_lo", "ci_hi", "p_value", "p_holm", "n_units"]
WIDTH = 100  # columns
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


# the table: one row for each finding


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


# pairs of responses


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
    """Return one row for each pair of responses to the same prompt in two runs.

    Args:
        column: the log-probs to compare, one of COLUMNS.
        iterations: the iterations to compare; None for all.

    Returns:
        The columns iteration, sequence, and

        diverged: whether a token differs
        compared: number of tokens up to and including the first different token, or of all
        delta_sum, abs_sum: sums of delta and |delta| over the tokens, nats, float64; NaN for a pair that diverged
        unequal: number of tokens whose log-probs differ in any bit; 0 for a pair that diverged

    Raises:
        UserError: another column, runs without responses, damaged records, or, without `iterations`, different
            numbers of iterations.
    """
    if column not in COLUMNS:
        raise UserError(f"column = {column!r}: must be {', '.join(COLUMNS)}")
    runs = tuple(zip((run_a, run_b), manifests(run_a, run_b), strict=True))
    require_responses(*runs[0])
    selected, others = (chosen_iterations(recorded, iterations) for _, recorded in runs)
    if len(selected) != len(others):
        raise UserError(
            f"{run_a} has {len(selected)} iterations, {run_b} has {len(others)}; name the iterations to compare"
        )
    if not len(selected):
        raise UserError(f"{run_a} and {run_b}: there is no iteration to compare")
    return pd.concat([_one_iteration(runs, column, i) for i in selected], ignore_index=True)


def _one_iteration(runs: Sequence[tuple[Path | str, Manifest]], column: str, iteration: int) -> pd.DataFrame:
    one, names = [iteration], ["sequence", "prompt_ids", "response_length"]
    texts = [reader.read_sequences(run, iterations=one, columns=names, recorded=recorded) for run, recorded in runs]
    responses = texts[0].merge(texts[1], on="sequence", suffixes=("_a", "_b"), validate="one_to_one")
    prompts = zip(responses["prompt_ids_a"], responses["prompt_ids_b"], strict=True)
    responses = responses[np.array([np.array_equal(x, y) for x, y in prompts], bool)]
    names = [*_KEY, "token_id", column]
    tokens = [reader.read_tokens(run, iterations=one, columns=names, recorded=recorded) for run, recorded in runs]
    both = tokens[0].merge(tokens[1], on=_KEY, suffixes=("_a", "_b"), validate="one_to_one")
    a, b = (both[f"{column}_{side}"].to_numpy(np.float32) for side in "ab")
    delta = b.astype(np.float64) - a.astype(np.float64)
    starts = np.flatnonzero(np.diff(both["sequence"], prepend=-1))
    # numpy, because pandas would skip NaN in sums
    sums = pd.DataFrame({"sequence": both["sequence"].to_numpy()[starts]})
    for name, values in (("delta", delta), ("abs_delta", np.abs(delta)), ("unequal", unequal_bits(a, b).astype(float))):
        sums[name] = segment_sums(values, starts)
    parted = both[both["token_id_a"] != both["token_id_b"]].groupby("sequence")["position"].min()
    return _responses(responses.merge(sums, on="sequence"), parted, iteration)


def _responses(responses: pd.DataFrame, first_difference: pd.Series, iteration: int) -> pd.DataFrame:
    lengths = responses[["response_length_a", "response_length_b"]].to_numpy(np.int64)
    first = responses["sequence"].map(first_difference).to_numpy(np.float64)
    # if a limit cut one response short, the first different token is the token after it
    inside, longer = ~np.isnan(first), lengths[:, 0] != lengths[:, 1]
    diverged = inside | longer
    return pd.DataFrame(
        {
            "iteration": np.full(len(responses), iteration, np.int32),
            "sequence": responses["sequence"].to_numpy(),
            "compared": np.where(inside, np.nan_to_num(first) + 1, lengths.min(axis=1) + longer).astype(np.int64),
            "diverged": diverged,
            "delta_sum": np.where(diverged, np.nan, responses["delta"]),
            "abs_sum": np.where(diverged, np.nan, responses["abs_delta"]),
            "unequal": np.where(diverged, 0, responses["unequal"]).astype(np.int64),
        }
    )


def hazard(compared: npt.NDArray[np.int64], diverged: npt.NDArray[np.bool_]) -> tuple[float, float, float]:
    """Return h = first differences per compared token, and the exact 95 % Poisson interval (low, high) of h.

    If h is the same at every position, a response of T tokens is identical with probability about exp(-h T).
    """
    exposure, count = int(compared.sum()), int(diverged.sum())
    low = float(stats.chi2.ppf(0.025, 2 * count)) / 2 if count else 0.0
    return count / exposure, low / exposure, float(stats.chi2.isf(0.025, 2 * (count + 1))) / 2 / exposure


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
    compared = same[finite]
    share = len(same) / len(responses) if len(responses) else math.nan
    rows = [
        Row("numeric", "same_responses", share, len(responses), "share with all tokens the same"),
        Row("numeric", "nonfinite", float((~finite).sum()), len(same), f"responses, {column}; left out below"),
    ]
    if len(responses):
        rate, low, high = hazard(responses["compared"].to_numpy(np.int64), responses["diverged"].to_numpy(bool))
        how = "first other tokens per token; exact Poisson interval"
        rows.append(Row("numeric", "divergence_hazard", rate, len(responses), how, ci_lo=low, ci_hi=high))
    if not len(compared):
        return rows
    lengths = compared["compared"].to_numpy(np.int64)
    deltas, absolute = (compared[name].to_numpy(np.float64) for name in ("delta_sum", "abs_sum"))
    test = significance.sign_flip(deltas / lengths, rng)
    size = significance.one_sample(absolute / lengths)
    low, high = significance.t_interval(size, 1 - 2 * alpha)

    def token_mean(name: str, sums: Floats) -> Row:
        value, se = ratio_of_sums(sums, lengths.astype(np.float64))
        lowest, highest = significance.t_interval(significance.Estimate(value, se, len(compared) - 1), 1 - alpha)
        how = "token mean; clustered by response"
        return Row("numeric", f"{column}.{name}", value, len(compared), how, ci_lo=lowest, ci_hi=highest)

    flips = f"mean of responses; {test.relabellings} sign changes{' (all)' if test.exact else ''}"
    exact = float((compared["unequal"] == 0).mean())
    return [
        *rows,
        Row("numeric", f"{column}.bitwise", exact, len(compared), "share of them with all bits equal"),
        Row("numeric", f"{column}.delta", test.stat, len(compared), flips, "difference", test.p_value),
        token_mean("delta", deltas),
        Row(
            *("numeric", f"{column}.abs_delta", size.mean, len(compared), "mean of responses; TOST", "equivalence"),
            *(significance.tost(size, margin), low, high, margin),
        ),
        token_mean("abs_delta", absolute),
    ]


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
        frames = (pairs[f"{name}_a"], pairs[f"{name}_b"]) if len(pairs) else (a[name], b[name])
        x, y = (values.to_numpy(np.float64) for values in frames)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            # a test without these values would compare only some of the responses
            rows.append(Row("distribution", name, math.nan, len(x) + len(y), "values are not finite", "difference"))
        elif len(pairs):
            test = significance.sign_flip(y - x, rng)
            how = f"mean of pairs; {test.relabellings} sign changes"
            rows.append(Row("distribution", name, test.stat, len(pairs), how, "difference", test.p_value))
        else:
            found = significance.welch(x, y)
            p_value = significance.t_test(found)
            rows.append(Row("distribution", name, found.mean, len(x) + len(y), "Welch's t", "difference", p_value))
    return rows


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
    rows = [
        _bitwise_row(run_a, run_b),
        *numeric_rows(responses, rng, column=column, margin=margin, alpha=alpha),
        *distribution_rows(run_a, run_b, iterations, rng),
        *_final_rows(run_a, run_b),
    ]
    return run_compare(str(run_a), str(run_b), rows, alpha)


def _bitwise_row(run_a: Path | str, run_b: Path | str) -> Row:
    """Compare the fingerprints; if they differ, the verdict names the first difference."""
    a, b = manifests(run_a, run_b)
    same, verdict = a.fingerprint == b.fingerprint, "identical"
    if not same:
        first = first_difference(run_a, run_b)
        verdict = f"different: {first.describe()}" if first else "different"
    iterations = max(len(a.iterations), len(b.iterations))
    return Row("bitwise", "fingerprint", float(same), iterations, "SHA-256 of all values", verdict=verdict)


def _final_rows(run_a: Path | str, run_b: Path | str) -> list[Row]:
    a, b = (found.final for found in manifests(run_a, run_b))
    rows = []
    for name in a:
        value_a, value_b = a[name], b.get(name)
        if not isinstance(value_a, str) and value_b is not None and not isinstance(value_b, str):
            how = "difference b - a of one run each: seeds decide, see `ppo-repro analyse table`"
            rows.append(Row("outcome", f"final.{name}", float(value_b) - float(value_a), 1, how, verdict="one seed"))
    return rows


# the command


def _run(text: str) -> Path:
    """Return the folder of a run. Raises UserError for a grid."""
    path = run_named(text)
    if (path / GRID).is_file():
        raise UserError(f"{text}: is a grid; `ppo-repro analyse table GRID --against SETTING` compares its settings")
    return path


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="ppo-repro analyse compare", description="are two runs the same?")
    parser.add_argument("runs", nargs="+", type=_run, metavar="RUN", help="two runs")
    parser.add_argument("--seed", type=int, required=True, help="seed of the sign changes")
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--margin", type=float, default=MARGIN, help=f"nats of mean |delta| that are equal ({MARGIN})")
    parser.add_argument("--column", choices=COLUMNS, default=COLUMNS[0], help=f"which log-probs ({COLUMNS[0]})")
    parser.add_argument("--iterations", nargs=2, type=int, metavar=("FIRST", "LAST"), help="only these (not of bits)")
    return parser.parse_args(argv)


def _iterations(a: Path, b: Path, first: int, last: int) -> range:
    count = min(len(found.iterations) for found in manifests(a, b))
    if not 0 <= first <= last < count:  # checked here: the range may be too long for a list
        raise UserError(f"--iterations {first} {last}: must be 0 <= FIRST <= LAST <= {count - 1}, which both runs have")
    return range(first, last + 1)


def _comparison(arguments: argparse.Namespace) -> pd.DataFrame:
    if arguments.seed < 0:
        raise UserError(f"--seed {arguments.seed}: must be 0 or more; give such a number")
    if len(arguments.runs) != 2:
        raise UserError(f"{len(arguments.runs)} given: give two runs")
    a, b = arguments.runs
    chosen = None if arguments.iterations is None else _iterations(a, b, *arguments.iterations)
    return compare_runs(
        a,
        b,
        np.random.default_rng(arguments.seed),
        margin=arguments.margin,
        column=arguments.column,
        iterations=chosen,
        alpha=arguments.alpha,
    )


def main(argv: Sequence[str]) -> None:
    """Print a comparison: for each level a table of numbers, and its verdicts and methods in words."""
    tell("\n".join(_lines(_comparison(_arguments(argv)))))


def _lines(table: pd.DataFrame) -> list[str]:
    out = [f"a  {table['run_a'].iloc[0]}", f"b  {table['run_b'].iloc[0]}"]
    for level, rows in table.groupby("level", sort=False):
        margins = [f", margin {margin:g}" if margin == margin else "" for margin in rows["margin"]]
        methods = [f"{method}{margin}" for method, margin in zip(rows["method"], margins, strict=True)]
        known = list(dict.fromkeys(methods))
        short = [verdict.partition(":")[0] for verdict in rows["verdict"]]
        numbers = (
            rows[SHOWN]
            .rename(columns={"n_units": "n"})
            .assign(verdict=short, method=[f"({known.index(name) + 1})" for name in methods])
        )
        shown = numbers.dropna(axis=1, how="all").to_string(index=False, na_rep="", float_format="{:.4g}".format)
        out += ["", str(level), *shown.splitlines()]
        out += [line for verdict in rows["verdict"] if ":" in verdict for line in _wrapped(verdict)]
        out += [line for number, name in enumerate(known, 1) for line in _wrapped(f"({number}) {name}")]
    return out


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
