"""Are two runs the same? `ppo-repro analyse compare A B --seed 0` asks four nested questions, with a verdict on each.

The level `bitwise` compares every recorded bit, `numeric` the log-probs of the same tokens, `distribution` scores and
lengths (`paired_responses`), and `outcome` the final results.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.comparison_table import Row, run_compare
from ppo_repro.analysis.paired_responses import (
    COLUMNS,
    distribution_rows,
    manifests,
    numeric_rows,
    paired_responses,
)
from ppo_repro.base.errors import UserError
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import Parser, tell
from ppo_repro.records.diff import first_difference
from ppo_repro.records.grid import GRID

# nats of mean |delta|; a smaller difference of two float32 forwards is rounding
MARGIN = 1e-3
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
        rng: draws sign changes.
        margin: mean |delta| of `column` below which log-probs count as the same, nats.
        column: the log-probs to compare, one of `paired_responses.COLUMNS`.
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
