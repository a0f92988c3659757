"""Implement `ppo-repro analyse compare`."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.comparison.compare import MARGIN, compare_runs
from ppo_repro.analysis.comparison.same_prompts import LOGPROB_COLUMNS, manifests
from ppo_repro.base.errors import UserError
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import print_result
from ppo_repro.records.grid import GRID

SHOWN = ["metric", "stat", "ci_lo", "ci_hi", "p_value", "p_holm", "n_units"]
WIDTH = 100  # columns


def add_options(option: Callable[..., argparse.Action]) -> None:
    """Add the options of the command."""
    option("runs", nargs="+", type=_folder_of_run, metavar="RUN", help="two runs")
    option("--seed", type=int, default=0, help="seed of the sign changes (0)")
    option("--alpha", type=float, default=0.05, help="the level of tests and intervals (0.05)")
    option("--margin", type=float, default=MARGIN, help=f"mean |delta| in nats that counts as equal ({MARGIN})")
    option(
        "--column",
        choices=LOGPROB_COLUMNS,
        default=LOGPROB_COLUMNS[0],
        help=f"which log-probs are compared ({LOGPROB_COLUMNS[0]})",
    )
    about = "compare only these iterations; bits are compared in all"
    option("--iterations", nargs=2, type=int, metavar=("FIRST", "LAST"), help=about)


def command(arguments: argparse.Namespace) -> None:
    """Print a comparison: for each level a table of numbers, and its verdicts and methods in words."""
    if arguments.seed < 0:
        raise UserError(f"--seed {arguments.seed}: must be 0 or more; give such a number")
    if len(arguments.runs) != 2:
        raise UserError(f"{len(arguments.runs)} given: give two runs")
    a, b = arguments.runs
    table = compare_runs(
        a,
        b,
        np.random.default_rng(arguments.seed),
        margin=arguments.margin,
        column=arguments.column,
        iterations=None if arguments.iterations is None else _iterations(a, b, *arguments.iterations),
        alpha=arguments.alpha,
    )
    findings = table.drop(columns=["run_a", "run_b"]).to_dict("records")
    print_result(arguments.json, {"run_a": str(a), "run_b": str(b), "findings": findings}, _lines(table))


def _folder_of_run(text: str) -> Path:
    """Return the folder of a run. Raises UserError for a grid."""
    path = run_named(text)
    if (path / GRID).is_file():
        raise UserError(f"{text}: is a grid; `ppo-repro analyse table GRID --against SETTING` compares its settings")
    return path


def _iterations(a: Path, b: Path, first: int, last: int) -> range:
    count = min(len(recorded.iterations) for recorded in manifests(a, b))
    if not 0 <= first <= last < count:  # checked here: the range may be too long for a list
        raise UserError(f"--iterations {first} {last}: must be 0 <= FIRST <= LAST <= {count - 1}, which both runs have")
    return range(first, last + 1)


def _lines(table: pd.DataFrame) -> list[str]:
    out = [f"a  {table['run_a'].iloc[0]}", f"b  {table['run_b'].iloc[0]}"]
    for level, rows in table.groupby("level", sort=False):
        margins = ["" if math.isnan(margin) else f", margin {margin:g}" for margin in rows["margin"]]
        methods = [f"{method}{margin}" for method, margin in zip(rows["method"], margins, strict=True)]
        known = list(dict.fromkeys(methods))
        short = [verdict.partition(":")[0] for verdict in rows["verdict"]]
        numbers = rows[SHOWN].assign(verdict=short, method=[f"({known.index(name) + 1})" for name in methods])
        shown = numbers.dropna(axis=1, how="all").to_string(index=False, na_rep="", float_format="{:.4g}".format)
        out += ["", str(level), *shown.splitlines()]
        out += [line for verdict in rows["verdict"] if ":" in verdict for line in _wrapped(verdict)]
        out += [line for number, name in enumerate(known, 1) for line in _wrapped(f"({number}) {name}")]
    return out


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
