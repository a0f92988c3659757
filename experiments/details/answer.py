"""Which implementation detail matters? `python -m experiments.details.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from pathlib import Path

from experiments.answers import outcome, settings_study
from ppo_repro.analysis.grid_outcomes import LAST_FEW
from ppo_repro.records import reader

AT_THE_END = "explained_variance_at_the_end"  # that of a grid is at the beginning


def measures(run_dir: Path) -> dict[str, float]:
    """Return the outcome, and the explained variance of the last iterations."""
    explained = reader.read_iterations(run_dir, columns=["explained_variance"])["explained_variance"]
    return outcome(run_dir) | {AT_THE_END: float(explained.tail(LAST_FEW).mean())}


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
            "explained variance at the end": (AT_THE_END, "{:.2f}"),
        },
        measures=measures,
    )
