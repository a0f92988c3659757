"""The picture of the README: `python -m analysis.report.readme_figure RUN... --out FILE.svg`.

Left, held-out accuracy of the runs in deterministic numerics, mean over seeds and their range; right, the share of
tokens whose log-prob the trainer computes otherwise than the sampler did, deterministic and native.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.grids.figure import MEAN, RUN, new_figure, svg
from analysis.program import program
from analysis.report.markup import share
from ppo_repro.errors import UserError
from ppo_repro.files import PICTURE, check_replaceable, write_over_earlier
from ppo_repro.output import Parser
from ppo_repro.records import reader
from ppo_repro.records.config_file import load_recorded_config

COLUMNS = ["iteration", "tokens", "unequal_old_rollout_logprobs", "eval_accuracy"]


def curves(folders: Sequence[Path]) -> pd.DataFrame:
    """mode, run, iteration, accuracy, tokens and unequal (tokens) of every iteration of every run.

    The last evaluation of a run, after its last update, is a row of its own without tokens. Raises UserError on
    records that are missing or damaged.
    """
    parts = []
    for folder in folders:
        rows = reader.read_iterations(folder, columns=COLUMNS)
        last = {"iteration": len(rows), "eval_accuracy": float(reader.open_manifest(folder).final["eval_accuracy"])}
        found = pd.concat([rows, pd.DataFrame([last])], ignore_index=True)
        parts.append(found.assign(mode=load_recorded_config(folder).numerics.mode, run=str(folder)))
    renamed = {"unequal_old_rollout_logprobs": "unequal", "eval_accuracy": "accuracy"}
    return pd.concat(parts, ignore_index=True).rename(columns=renamed)


def over_runs(found: pd.DataFrame, measure: str) -> pd.DataFrame:
    """mean, min and max over runs by iteration."""
    return found[found[measure].notna()].groupby("iteration")[measure].agg(["mean", "min", "max"])


def draw(found: pd.DataFrame) -> str:
    """The picture; UserError unless runs of both numerics are there."""
    modes = {str(mode): rows for mode, rows in found.groupby("mode")}
    if set(modes) != {"deterministic", "native"}:
        raise UserError(
            f"runs in deterministic and in native numerics are needed; these are {', '.join(sorted(modes))}"
        )
    figure, (left, right) = new_figure(9.5, 3.6, 2)
    lines = [(left, modes["deterministic"], "accuracy", RUN, "deterministic")]
    for colour, (mode, rows) in zip((RUN, MEAN), modes.items(), strict=True):
        total, unequal = int(rows["tokens"].sum()), int(rows["unequal"].sum())
        name = f"{mode}: {share(unequal, total) if unequal else f'0 of {total:,}'}"
        lines.append((right, rows.assign(percent=100 * rows["unequal"] / rows["tokens"]), "percent", colour, name))
    for axes, rows, measure, colour, name in lines:
        line = over_runs(rows, measure)
        at = line.index.to_numpy(np.float64)
        axes.plot(at, line["mean"], color=colour, label=name)
        axes.fill_between(at, line["min"], line["max"], color=colour, alpha=0.2, linewidth=0)
    seeds = modes["deterministic"]["run"].nunique()
    left.set_title(f"Learning, deterministic: mean and range of {seeds} seeds")
    left.set_ylabel("greedy accuracy, held out")
    right.set_title("Tokens whose log-probs differ in any bit")
    right.set_ylabel("sampler ≠ trainer, %")
    right.legend()
    for axes in (left, right):
        axes.set_xlabel("iteration of PPO")
        axes.set_ylim(bottom=0)
    return svg(figure)


@program
def main(argv: Sequence[str] | None) -> None:
    """Write the picture; exit code 2 and one line if what the user wrote is wrong."""
    parser = Parser(
        prog="python -m analysis.report.readme_figure",
        description="the picture of the README, from recorded runs in both numerics",
    )
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="folders of runs that differ in seed and mode"
    )
    parser.add_argument("--out", type=Path, required=True, help="the SVG file to write")
    arguments = parser.parse_args(argv)
    check_replaceable(arguments.out, PICTURE)
    write_over_earlier(arguments.out, PICTURE, draw(curves(arguments.runs)).encode())


if __name__ == "__main__":
    sys.exit(main())
