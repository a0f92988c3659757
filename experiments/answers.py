"""Run the program of a study: `python -m experiments.STUDY.answer [GRID]`.

With the folder of a grid, the program reads the runs of its complete cells, and writes `results.csv` and `answer.svg`
into the study's folder. Then, or without a grid, it prints the tables of the page from `results.csv`. With `--csv FILE`
it only writes the rows, to another file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.csv_text import csv_text
from ppo_repro.analysis.figures import svg
from ppo_repro.analysis.grids.outcomes import LAST, complete_cells, end_measures, mismatch
from ppo_repro.analysis.grids.table import comparisons, markdown
from ppo_repro.analysis.stats.significance import detectable, one_sample, t_interval, tost, with_interval
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import atomic_write, require_ours
from ppo_repro.base.output import Parser, tell
from ppo_repro.base.program import program
from ppo_repro.grids.study import BESIDE, RESULTS
from ppo_repro.records import reader
from ppo_repro.records.grid import axes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE = "answer.svg"
MARGIN = 0.05  # of `equality_table`: a smaller difference counts as none

Labels = dict[str, str]


def outcome(run_dir: Path) -> dict[str, float]:
    """Return the measures of a run that every study reports.

    accuracy: share of right greedy responses to held-out prompts after training; start: before training; mean_accuracy:
    mean over all evaluations but the first. score, KL (policy to reference, nats per response), entropy (nats per
    token), length (tokens per response): means over the sampled responses of the last iterations. tokens: number of
    response tokens. k3: estimate of KL(sampler || trainer), nats per token, all iterations.
    """
    rows = reader.read_iterations(run_dir)
    held_out = reader.read_evaluations(run_dir, columns=["iteration", "is_correct"])
    accuracy = held_out.groupby("iteration")["is_correct"].mean()
    return {
        "accuracy": float(accuracy.iloc[-1]),
        "start": float(accuracy.iloc[0]),
        "mean_accuracy": float(accuracy.iloc[1:].mean()),
        **end_measures(rows),
        "length": float(rows["response_length_mean"].tail(LAST).mean()),
        "tokens": float(rows["tokens"].sum()),
        "k3": mismatch(run_dir)[0],
    }


def results_of(
    grid: Path,
    measures: Callable[[Path, Path | None], dict[str, float]],
    beside: Callable[[Labels], Labels | None],
) -> pd.DataFrame:
    """Return one row per complete cell: cell, axes, seed, fingerprint, the cell beside it, its measures.

    Some measures compare a cell with another cell of the same seed. `beside` returns the labels of the other cell, or
    None. Raises UserError if the other cell is not complete.
    """
    cells = complete_cells(grid)
    axes = axes_of(cells)
    rows = []
    for row in cells.to_dict("records"):
        labels = {axis.removeprefix("axis."): str(row[axis]) for axis in axes}
        other, name = beside(labels), ""
        run_dir, other_dir = grid / str(row["run_dir"]), None
        if other is not None:
            same = cells["seed"] == row["seed"]
            for axis, label in other.items():
                same &= cells[f"axis.{axis}"].astype(str) == label
            if not same.any():
                raise UserError(f"{row['cell']}: the cell beside it, {other}, is not complete; run it first")
            found = cells[same].iloc[0]
            name, other_dir = str(found["cell"]), grid / str(found["run_dir"])
        about = {"cell": row["cell"], **labels, "seed": row["seed"], "fingerprint": row["fingerprint"], BESIDE: name}
        rows.append({**about, **measures(run_dir, other_dir)})
    return pd.DataFrame(rows)


def interval(values: npt.ArrayLike, form: str = "{:.3f}") -> str:
    """Return the mean and 95 % Student interval over seeds, as text."""
    estimate = one_sample(np.asarray(values, np.float64))
    return with_interval(form, estimate.mean, *t_interval(estimate, 0.95))


def differences(results: pd.DataFrame, points: pd.Series, measure: str, against: str) -> pd.DataFrame:
    """Compare each point with the point `against`, paired by seed.

    Args:
        results: rows of a study's cells.
        points: the point of each row.
        measure: the column to compare.
        against: the point with which the others are compared.

    Returns:
        point, difference (mean and 95 % Student interval, as text), p (paired t-test, Holm's correction, as text).
    """
    frame = pd.DataFrame({"point": points, "seed": results["seed"], measure: results[measure]})
    table = comparisons(frame, measure, against)
    shown = [with_interval("{:+.3f}", *numbers) for numbers in table[["difference", "low", "high"]].to_numpy()]
    return pd.DataFrame({"point": table["point"], "difference": shown, "p": [f"{p:.3f}" for p in table["Holm"]]})


def settings_table(
    results: pd.DataFrame, axis: str, measure: str, title: str, against: str, columns: dict[str, tuple[str, str | None]]
) -> pd.DataFrame:
    """Return one row per setting of an axis, with every cell as text.

    Args:
        results: rows of a study's cells.
        axis: the column with the settings.
        measure: the measure to compare.
        title: title of the measure's column.
        against: the setting with which the others are compared.
        columns: more columns by title: a measure, and the format of its mean (None: mean with interval).
    """
    compared = differences(results, results[axis], measure, against).set_index("point")
    rows = []
    for point, cells in results.groupby(axis, sort=False):
        row = {axis: point, title: interval(cells[measure])}
        row |= {f"minus {against}": compared["difference"].get(point, ""), "p, Holm": compared["p"].get(point, "")}
        for shown, (name, form) in columns.items():
            row[shown] = interval(cells[name]) if form is None else form.format(cells[name].mean())
        rows.append(row)
    return pd.DataFrame(rows)


def equality_table(results: pd.DataFrame, axis: str, same: str, other: str) -> pd.DataFrame:
    """Return how far two settings of an axis are apart, paired by seed, in accuracy and score; every cell as text.

    A row per measure: means and 95 % intervals, the difference `other` minus `same`, two one-sided t-tests of MARGIN,
    and the smallest difference that the seeds would have shown.
    """
    titles = {"mean_accuracy": "accuracy, mean over training", "accuracy": "accuracy at the end", "score": "score"}
    rows = []
    for measure, title in titles.items():
        values = {setting: cells.set_index("seed")[measure] for setting, cells in results.groupby(axis)}
        apart = (values[other] - values[same]).to_numpy(np.float64)
        estimate = one_sample(apart)
        smallest = detectable(float(apart.std(ddof=1)), len(apart), 0.05)
        rows.append(
            {
                "measure": title,
                **{setting: interval(values[setting]) for setting in (same, other)},
                f"{other} minus {same}": interval(apart, "{:+.3f}"),
                f"p of at least {MARGIN:g} apart": f"{tost(estimate, MARGIN):.3f}",
                "smallest effect found with power 0.8": f"{smallest:.3f}",
                "sd over seeds": f"{values[same].std():.3f}",
                "sd of the difference": f"{apart.std(ddof=1):.3f}",
            }
        )
    return pd.DataFrame(rows)


def nothing(labels: Labels) -> None:
    """Return None: no measure compares a cell with another cell."""


def study(
    file: str,
    tables: Callable[[pd.DataFrame], Sequence[pd.DataFrame]],
    figure: Callable[[pd.DataFrame], Axes],
    measures: Callable[[Path, Path | None], dict[str, float]] = lambda run_dir, _: outcome(run_dir),
    beside: Callable[[Labels], Labels | None] = nothing,
) -> NoReturn:
    """Run the program of a study, and end the process with its exit code.

    Args:
        file: the study's `answer.py`.
        tables: makes the tables of the page from the rows of the cells.
        figure: draws the figure of the page from the rows of the cells.
        measures: computes the measures of a run, and of the run beside it or None.
        beside: returns the labels of the cell to compare a cell with, or None.
    """
    folder = Path(file).parent

    @program
    def main(argv: Sequence[str] | None) -> None:
        parser = Parser(prog=f"python -m experiments.{folder.name}.answer", description="the answer of a study")
        parser.add_argument("grid", type=Path, nargs="?", help="folder of the grid; default: the committed results")
        about = "write only the rows of the cells, to this file; replaces only a file of such rows"
        parser.add_argument("--csv", type=Path, help=about)
        arguments = parser.parse_args(argv)
        results = folder / RESULTS
        if arguments.grid is not None:
            text = csv_text(results_of(arguments.grid, measures, beside), "%.6g")
            if arguments.csv is not None:
                header = text.partition("\n")[0].encode()
                require_ours(arguments.csv, lambda path: path.read_bytes().startswith(header))
            atomic_write(arguments.csv or results, text.encode())
            if arguments.csv is not None:
                return
        rows = pd.read_csv(results, keep_default_na=False, na_values=["", "nan"])
        if arguments.grid is not None:
            (folder / FIGURE).write_text(svg(figure(rows)), encoding="utf-8")
        tell("\n\n".join(markdown(table) for table in tables(rows)))

    sys.exit(main())
