"""Draw README's figure of the quickstart: `python -m experiments.figures.quickstart RUN...`.

The runs are of `experiments/quickstart.yaml` with `seed` 0 to 4, in both numerics modes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from ppo_repro.analysis import figures
from ppo_repro.base.errors import UserError
from ppo_repro.base.output import Parser
from ppo_repro.base.program import program
from ppo_repro.records import reader
from ppo_repro.records.folder import load_recorded_config

FIGURE = Path(__file__).with_suffix(".svg")


def accuracies(run: Path) -> pd.DataFrame:
    """Return the held-out accuracy of a run by iteration; the last row is after the last update."""
    rows = reader.read_iterations(run, columns=["iteration", "eval_accuracy"])
    last = {"iteration": len(rows), "eval_accuracy": float(reader.open_manifest(run).final["eval_accuracy"])}
    return pd.concat([rows, pd.DataFrame([last])], ignore_index=True)


def quickstart_figure(runs: Sequence[Path]) -> Axes:
    """Draw held-out accuracy of the deterministic runs, and beside it how often sampler and trainer differ in all."""
    deterministic = [run for run in runs if load_recorded_config(run).numerics.mode == "deterministic"]
    if not deterministic:
        raise UserError("no run is deterministic, so there is no accuracy to draw; give runs of both numerics modes")
    seeds = f"deterministic, {len(deterministic)} runs"
    left, right = figures.new_axes(9.5, 3.6, 2)
    figures.band(pd.concat(map(accuracies, deterministic)), "eval_accuracy", left, seeds)
    left.set(title="Learning: mean and range", xlabel="iteration", ylabel="greedy accuracy, held out")
    left.set_ylim(bottom=0)
    left.legend()
    return figures.agreement_figure(runs, right)


@program
def main(argv: Sequence[str] | None) -> None:
    parser = Parser(prog="python -m experiments.figures.quickstart", description="draws README's figure")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="runs of experiments/quickstart.yaml")
    FIGURE.write_text(figures.svg(quickstart_figure(parser.parse_args(argv).runs)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
