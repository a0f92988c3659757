"""Run the program of a study: `python -m experiments.STUDY.answer [GRID]`.

With the folder of a grid, the program reads the runs of its complete cells, and writes `results.csv` and `answer.svg`
into the study's folder. Then, or without a grid, it prints the tables of the page from `results.csv`. With `--csv FILE`
it only writes the rows, to another file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pandas as pd

from ppo_repro.analysis import figures
from ppo_repro.analysis.csv_text import csv_text
from ppo_repro.analysis.grid_outcomes import ACCURACY, LAST_FEW, complete_cells, mismatch_of_cell
from ppo_repro.analysis.grid_table import comparisons, markdown
from ppo_repro.analysis.mean_text import mean_alone, mean_and_interval, with_interval
from ppo_repro.analysis.run_tables import run_tables
from ppo_repro.analysis.significance import detectable, one_sample, tost
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
TITLES = {"mean_accuracy": "accuracy, mean over training", ACCURACY: "accuracy at the end", "score_mean": "score"}
# columns of `iterations`, whose means over the last iterations every study reports
AVERAGED = ("score_mean", "ref_kl_per_sequence", "entropy", "response_length_mean")
MARGIN = 0.05  # of `equality_table`: a smaller difference counts as none

Labels = dict[str, str]
Columns = dict[str, tuple[str, str | None]]  # by title: a measure, and the format of its mean; None: with interval
Measures = Callable[[Path], dict[str, float]]
Draw = Callable[[pd.DataFrame], "Axes"]


@dataclass(frozen=True)
class Twin:
    """Compares a cell with another cell of the same seed."""

    labels: Callable[[Labels], Labels | None]  # labels of the other cell, None if there is none
    measures: Callable[[Path, Path], dict[str, float]]  # further measures of the first run, beside the other run


def outcome(run_dir: Path) -> dict[str, float]:
    """Return the measures of a run that every study reports.

    eval_accuracy: share of right greedy responses to held-out prompts after training; start: before training;
    mean_accuracy: mean over all evaluations but the first. Columns of AVERAGED: means over the last iterations.
    tokens: number of response tokens. k3: estimate of KL(sampler || trainer), nats per token, all iterations.
    """
    rows = reader.read_iterations(run_dir)
    last = rows.tail(LAST_FEW)
    held_out = reader.read_evaluations(run_dir, columns=["iteration", "is_correct"])
    accuracy = held_out.groupby("iteration")["is_correct"].mean()
    return {
        ACCURACY: float(accuracy.iloc[-1]),
        "start": float(accuracy.iloc[0]),
        "mean_accuracy": float(accuracy.iloc[1:].mean()),
        **{name: float(last[name].mean(skipna=False)) for name in AVERAGED},
        "tokens": float(rows["tokens"].sum()),
        "k3": mismatch_of_cell(run_tables(run_dir)).k3,
    }


def results_of(grid: Path, measures: Measures, twin: Twin | None) -> pd.DataFrame:
    """Return one row per complete cell: cell, axes, seed, fingerprint, the cell beside it, its measures.

    Raises UserError if the twin of a cell is not complete.
    """
    cells = complete_cells(grid)
    axes = axes_of(cells)
    rows = []
    for row in cells.to_dict("records"):
        labels = {axis.removeprefix("axis."): str(row[axis]) for axis in axes}
        run_dir, name = grid / str(row["run_dir"]), ""
        measured = measures(run_dir)
        if twin is not None and (other := twin.labels(labels)) is not None:
            same = cells["seed"] == row["seed"]
            for axis, label in other.items():
                same &= cells[f"axis.{axis}"].astype(str) == label
            if not same.any():
                raise UserError(f"{row['cell']}: the cell beside it, {other}, is not complete; run it first")
            found = cells[same].iloc[0]
            name = str(found["cell"])
            measured |= twin.measures(run_dir, grid / str(found["run_dir"]))
        about = {"cell": row["cell"], **labels, "seed": row["seed"], "fingerprint": row["fingerprint"], BESIDE: name}
        rows.append({**about, **measured})
    return pd.DataFrame(rows)


def settings_table(
    results: pd.DataFrame, axis: str, measure: str, title: str, against: str, columns: Columns
) -> pd.DataFrame:
    """Return one row per setting of the column `axis`, with every cell as text.

    The setting `against` is compared with each other setting in `measure`, paired by seed: 95 % Student interval,
    paired t-test, Holm's correction. `title` is the title of the measure's column.
    """
    table = comparisons(results.assign(point=results[axis]), measure, against)
    compared = {row.point: row for row in table.itertuples()}
    rows = []
    for point, cells in results.groupby(axis, sort=False):
        row = {axis: point, title: mean_and_interval(cells[measure]), f"minus {against}": "", "p, Holm": ""}
        if (other := compared.get(point)) is not None:
            row[f"minus {against}"] = with_interval("{:+.3f}", other.difference, other.ci_lo, other.ci_hi)
            row["p, Holm"] = f"{other.p_holm:.3f}"
        for shown, (name, form) in columns.items():
            row[shown] = mean_and_interval(cells[name]) if form is None else mean_alone(cells[name], form)
        rows.append(row)
    return pd.DataFrame(rows)


def equality_table(results: pd.DataFrame, axis: str, same: str, other: str) -> pd.DataFrame:
    """Return how far two settings of an axis are apart, paired by seed, in accuracy and score; every cell as text.

    A row per measure: means and 95 % intervals, the difference `other` minus `same`, two one-sided t-tests of MARGIN,
    and the smallest difference that the seeds would have shown.
    """
    rows = []
    for measure, title in TITLES.items():
        values = {setting: cells.set_index("seed")[measure] for setting, cells in results.groupby(axis)}
        apart = (values[other] - values[same]).to_numpy(np.float64)
        estimate = one_sample(apart)
        smallest = detectable(float(apart.std(ddof=1)), len(apart), 0.05)
        rows.append(
            {
                "measure": title,
                **{setting: mean_and_interval(values[setting]) for setting in (same, other)},
                f"{other} minus {same}": mean_and_interval(apart, "{:+.3f}"),
                f"p of at least {MARGIN:g} apart": f"{tost(estimate, MARGIN):.3f}",
                "smallest effect found with power 0.8": f"{smallest:.3f}",
                "sd over seeds": f"{values[same].std():.3f}",
                "sd of the difference": f"{apart.std(ddof=1):.3f}",
            }
        )
    return pd.DataFrame(rows)


def settings_figure(axis: str, measure: str) -> Draw:
    """Return the function that draws a measure's values and mean for each setting of the column `axis`."""
    return lambda results: figures.settings_figure(results.assign(point=results[axis]), measure)


def settings_study(
    file: str,
    axis: str,
    measure: str,
    title: str,
    against: str,
    columns: Columns,
    measures: Measures = outcome,
    figure: Draw | None = None,
) -> NoReturn:
    """Run the program of a study whose page has a `settings_table` and, without `figure`, a `settings_figure`."""
    study(
        file,
        lambda results: [settings_table(results, axis, measure, title, against, columns)],
        figure or settings_figure(axis, measure),
        measures,
    )


def study(
    file: str,
    tables: Callable[[pd.DataFrame], Sequence[pd.DataFrame]],
    figure: Draw,
    measures: Measures = outcome,
    twin: Twin | None = None,
) -> NoReturn:
    """Run the program of a study, `file`, and end the process with its exit code.

    `tables` and `figure` make the tables and the figure of the page from the rows of the cells. `measures` computes
    the measures of a run, and `twin` further measures that compare it with another run.
    """
    folder = Path(file).parent

    @program
    def main(argv: Sequence[str] | None) -> None:
        parser = Parser(prog=f"python -m experiments.{folder.name}.answer", description="the answer of a study")
        parser.add_argument("grid", type=Path, nargs="?", help="folder of the grid; default: the committed results")
        about = "write only the rows of the cells, to this file; replaces only a file of such rows"
        parser.add_argument("--csv", type=Path, help=about)
        arguments = parser.parse_args(argv)
        if arguments.csv is not None and arguments.grid is None:
            raise UserError(f"--csv {arguments.csv}: the rows come from the runs of a grid; give its folder too")
        results = folder / RESULTS
        if arguments.grid is not None:
            text = csv_text(results_of(arguments.grid, measures, twin), "%.6g")
            if arguments.csv is not None:
                header = text.partition("\n")[0].encode()
                require_ours(arguments.csv, lambda path: path.read_bytes().startswith(header))
            atomic_write(arguments.csv or results, text.encode())
            if arguments.csv is not None:
                return
        rows = pd.read_csv(results, keep_default_na=False, na_values=["", "nan"])
        if arguments.grid is not None:
            (folder / FIGURE).write_text(figures.svg(figure(rows)), encoding="utf-8")
        tell("\n\n".join(markdown(table) for table in tables(rows)))

    sys.exit(main())
