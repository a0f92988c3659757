"""A run under the published keys of eight frameworks: `python -m analysis.dialects.report RUN`, or `--definitions`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.clipping.update_rows import load_iterations
from analysis.dialects.formulas import evaluate
from analysis.dialects.table import KEYS
from analysis.program import program
from analysis.words import explained
from ppo_repro.errors import UserError
from ppo_repro.output import Parser, tell


def definitions() -> pd.DataFrame:
    """One row per published key: framework, key, formula, anchor, reduction, difference, is_derived, source, words.

    `in_words` explains the terms that occur in reduction and difference.
    """
    rows = []
    for key in KEYS:
        repository, path, commit = key.source
        rows.append(
            {
                **{n: getattr(key, n) for n in ("framework", "key", "formula", "anchor", "reduction", "difference")},
                "is_derived": key.value is not None,
                "repository": repository,
                "path": path,
                "commit": commit,
                "in_words": explained(f"{key.reduction}; {key.difference}"),
            }
        )
    return pd.DataFrame(rows)


def long_table(
    run_dir: Path | str, *, iterations: Sequence[int] | None = None, band: tuple[float, float] | None = None
) -> pd.DataFrame:
    """framework, key, iteration, epoch, minibatch, value; epoch and minibatch are null for keys of an iteration.

    Raises UserError where records are missing, or where nothing is clipped and there is no band.
    """
    items = load_iterations(run_dir, iterations=iterations, band=band)
    table = pd.DataFrame([row for item in items for row in evaluate(item, KEYS)])
    return table.astype({"epoch": "Int64", "minibatch": "Int64"})


@program
def main(argv: Sequence[str] | None) -> None:
    """Print each key's mean over the run, or the definitions of the keys; exit code 2 on a user error."""
    parser = Parser(
        prog="python -m analysis.dialects.report", description="a run under the published keys of other frameworks"
    )
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run")
    parser.add_argument("--definitions", action="store_true", help="what each key means, with its source")
    parser.add_argument("--clip-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="in place of the run's own")
    arguments = parser.parse_args(argv)
    if arguments.definitions == (arguments.run is not None):
        parser.error("give either a run or --definitions")
    if arguments.definitions:
        if arguments.clip_range is not None:
            raise UserError("--clip-range: changes no definition; leave it out, or give a run")
        tell(definitions().to_csv(index=False, sep="\t"), end="")
        return
    band = None if arguments.clip_range is None else (arguments.clip_range[0], arguments.clip_range[1])
    table = long_table(arguments.run, band=band)
    means = table.groupby(["framework", "key"], sort=False)["value"].agg(["first", "mean", "last"])
    tell(means.to_string(float_format=lambda x: f"{x:.4g}"))


if __name__ == "__main__":
    sys.exit(main())
