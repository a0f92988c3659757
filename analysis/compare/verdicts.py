"""Are two runs, or two groups of seeds, the same? Four nested questions, a verdict on each.

    ppo-repro analyse compare A B --seed 0                                    two runs
    ppo-repro analyse compare GRID --axis NAME --a LABEL --b LABEL --seed 0   two settings of a grid

The level `bitwise` compares every recorded bit, `numeric` the log-probs of the same tokens, `distribution` scores and
lengths (`paired`), and `outcome` the final results over seeds (`seeds`).
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.compare.paired import COLUMNS, distribution_rows, manifests, numeric_rows, paired_responses
from ppo_repro.analysis.compare.rows import Row, run_compare
from ppo_repro.analysis.compare.seeds import compare_groups
from ppo_repro.base.errors import UserError
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import Parser, tell
from ppo_repro.records.diff import first_difference
from ppo_repro.records.grid import CELLS, RESULTS, read_grid_table

# nats of mean |delta|; a smaller difference of two float32 forwards is rounding
MARGIN = 1e-3
USUAL_METRICS = ("final.eval_accuracy", "final.eval_score")
SHOWN = ["metric", "stat", "ci_lo", "ci_hi", "p_value", "p_holm", "n_units"]
WIDTH = 100  # columns


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
        run_a, run_b: the runs.
        rng: draws sign changes.
        margin: mean |delta| of `column` below which log-probs count as the same, nats.
        column: the log-probs to compare, one of `paired.COLUMNS`.
        iterations: iterations for the levels numeric and distribution; None for all.
        alpha: level of the tests and intervals.

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
            how = "difference b - a of one run each: seeds decide, see --axis"
            rows.append(Row("outcome", f"final.{name}", float(value_b) - float(value_a), 1, how, verdict="one seed"))
    return rows


def compare_grid(
    grid_dir: Path,
    axis: str,
    a: str,
    b: str,
    metrics: Sequence[str],
    rng: np.random.Generator,
    *,
    paired: bool,
    margin: float | None,
    alpha: float,
) -> pd.DataFrame:
    """Compare two settings of a grid by `compare_groups`.

    Args:
        grid_dir: folder of the grid.
        axis, a, b: the axis, and its two labels to compare.
        metrics: columns `final.*` of cells.parquet, or columns of results.parquet, but not both.
        rng, paired, margin, alpha: the arguments of `compare_groups`.

    Returns:
        The table of `run_compare`.

    Raises:
        UserError: a table is missing, or `compare_groups` raises the error.
    """
    are_final = {name.startswith("final.") for name in metrics}
    if len(are_final) != 1:
        raise UserError(f"metrics {', '.join(metrics)}: name final metrics or metrics of iterations, not both")
    frame = read_grid_table(grid_dir / (CELLS if are_final == {True} else RESULTS))
    return compare_groups(frame, axis, a, b, metrics, rng, paired=paired, margin=margin, alpha=alpha)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="ppo-repro analyse compare", description="are two runs the same?")
    parser.add_argument("paths", nargs="+", type=run_named, help="two runs, or one grid with --axis")
    parser.add_argument("--seed", type=int, required=True, help="seed of the sign changes")
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--margin", type=float, help=f"what counts as equal: nats of mean |delta| (runs: {MARGIN})")
    runs = parser.add_argument_group("two runs")
    runs.add_argument("--column", choices=COLUMNS, help="which log-probs (old_logprobs)")
    runs.add_argument("--iterations", nargs=2, type=int, metavar=("FIRST", "LAST"), help="only these (not of bits)")
    grid = parser.add_argument_group("a grid")
    grid.add_argument("--axis")
    grid.add_argument("--a", help="label of the first group")
    grid.add_argument("--b", help="label of the second")
    grid.add_argument("--metric", action="append", help=f"column ({', '.join(USUAL_METRICS)}); may be repeated")
    grid.add_argument("--unpaired", action="store_true", help="do not pair by seed")
    return parser.parse_args(argv)


def _iterations(a: Path, b: Path, first: int, last: int) -> range:
    count = min(len(found.iterations) for found in manifests(a, b))
    if not 0 <= first <= last < count:  # checked here: the range may be too long for a list
        raise UserError(f"--iterations {first} {last}: must be 0 <= FIRST <= LAST <= {count - 1}, which both runs have")
    return range(first, last + 1)


def _comparison(arguments: argparse.Namespace) -> pd.DataFrame:
    if arguments.seed < 0:
        raise UserError(f"--seed {arguments.seed}: must be 0 or more; give such a number")
    rng = np.random.default_rng(arguments.seed)
    if arguments.axis is not None:
        has_labels = arguments.a is not None and arguments.b is not None
        if len(arguments.paths) != 1 or not has_labels or arguments.column or arguments.iterations:
            raise UserError("--axis: goes with one grid, --a and --b, and without --column and --iterations")
        metrics = arguments.metric or USUAL_METRICS
        return compare_grid(
            arguments.paths[0],
            arguments.axis,
            arguments.a,
            arguments.b,
            metrics,
            rng,
            paired=not arguments.unpaired,
            margin=arguments.margin,
            alpha=arguments.alpha,
        )
    if len(arguments.paths) != 2 or arguments.a or arguments.b or arguments.metric or arguments.unpaired:
        raise UserError("give two runs, or a grid with --axis; --a, --b, --metric and --unpaired are for grids")
    margin = MARGIN if arguments.margin is None else arguments.margin
    a, b = arguments.paths
    iterations = None if arguments.iterations is None else _iterations(a, b, *arguments.iterations)
    return compare_runs(
        a, b, rng, margin=margin, column=arguments.column or COLUMNS[0], iterations=iterations, alpha=arguments.alpha
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
