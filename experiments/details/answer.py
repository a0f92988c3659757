"""Which implementation detail matters? `python -m experiments.details.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from pathlib import Path

from experiments.answers import LAST, outcome, settings_study
from ppo_repro.records import reader


def measures(run_dir: Path) -> dict[str, float]:
    """Return the outcome, and the explained variance of the last iterations."""
    name = "explained_variance"
    return outcome(run_dir) | {name: float(reader.read_iterations(run_dir, columns=[name])[name].tail(LAST).mean())}


if __name__ == "__main__":
    settings_study(
        __file__,
        axis="detail",
        measure="mean_accuracy",
        title="accuracy, mean over training",
        against="usual",
        columns={
            "at the end": ("eval_accuracy", None),
            "KL, nats a response": ("ref_kl_per_sequence", "{:.2f}"),
            "entropy, nats a token": ("entropy", "{:.3f}"),
            "explained variance at the end": ("explained_variance", "{:.2f}"),
        },
        measures=measures,
    )
