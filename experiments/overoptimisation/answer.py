"""Where does a learned reward stop helping? `python -m experiments.overoptimisation.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from experiments.answers import outcome, settings_study
from ppo_repro.analysis import figures
from ppo_repro.analysis.grid_outcomes import LAST_FEW
from ppo_repro.records import reader

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def measures(run_dir: Path) -> dict[str, float]:
    """Return the outcome, change = accuracy after - before training, the best accuracy, the KL there, and curves.

    score_gain: mean learned score of the last iterations - mean learned score of the first. accuracy_I, KL_I: at
    iteration I.
    """
    rows = reader.read_iterations(run_dir, columns=["score_mean", "ref_kl_per_sequence"])
    held_out = reader.read_evaluations(run_dir, columns=["iteration", "is_correct"])
    accuracy = held_out.groupby("iteration")["is_correct"].mean()
    found = outcome(run_dir)
    found["change"] = found["eval_accuracy"] - found["start"]
    found["score_gain"] = float(rows["score_mean"].tail(LAST_FEW).mean() - rows["score_mean"].head(LAST_FEW).mean())
    found["best"], found["best_at"] = float(accuracy.max()), float(accuracy.idxmax())
    for iteration, value in accuracy.items():  # the last evaluation comes after the last rollout
        found[f"accuracy_{iteration:02d}"] = float(value)
        found[f"KL_{iteration:02d}"] = float(rows["ref_kl_per_sequence"].iloc[min(int(iteration), len(rows) - 1)])
    return found


def figure(results: pd.DataFrame) -> Axes:
    (axes,) = figures.new_axes(8.0, 3.6)
    names = sorted(name for name in results.columns if name.startswith("accuracy_"))
    for setting, group in results.groupby("setting", sort=False):
        moved = group[[name.replace("accuracy", "KL") for name in names]].mean()
        axes.plot(moved.to_numpy(), group[names].mean().to_numpy(), "o-", label=str(setting))
    axes.set(xlabel="KL(policy || reference), nats a response", ylabel="accuracy by the verifier, held out")
    axes.legend()
    return axes


if __name__ == "__main__":
    settings_study(
        __file__,
        axis="setting",
        measure="change",
        title="accuracy, end minus start",
        against="coefficient 0.05",
        columns={
            "learned score, gain": ("score_gain", None),
            "best accuracy": ("best", "{:.3f}"),
            "at iteration": ("best_at", "{:.0f}"),
            "KL at the end, nats a response": ("ref_kl_per_sequence", "{:.2f}"),
            "entropy, nats a token": ("entropy", "{:.3f}"),
            "length, tokens": ("response_length_mean", "{:.2f}"),
        },
        measures=measures,
        figure=figure,
    )
