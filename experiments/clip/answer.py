"""What does the clipped share say about a run?

`python -m experiments.clip.answer [GRID]`; see `experiments/answers.py`.
"""

from __future__ import annotations

from pathlib import Path

from experiments.answers import outcome, settings_study
from experiments.clip.across import across_figure
from ppo_repro.analysis.grid_outcomes import clip_shares_of_cell
from ppo_repro.analysis.run_tables import run_tables

MEASURE = "mean_accuracy"


def measures(run_dir: Path) -> dict[str, float]:
    """Return the outcome, and two shares of token visits: without a gradient, and outside the band."""
    return outcome(run_dir) | clip_shares_of_cell(run_tables(run_dir))._asdict()


if __name__ == "__main__":
    settings_study(
        __file__,
        axis="setting",
        measure=MEASURE,
        title="accuracy, mean over training",
        against="usual",
        columns={
            "at the end": ("eval_accuracy", None),
            "KL, nats a response": ("ref_kl_per_sequence", "{:.2f}"),
            "gradient removed": ("clip_fraction", "{:.1%}"),
            "outside the band": ("outside_fraction", "{:.1%}"),
        },
        measures=measures,
        figure=lambda results: across_figure(results, "clip_fraction", MEASURE),
    )
