"""What does the critic need? `python -m experiments.critic.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.answers import outcome, settings_study
from ppo_repro.analysis.grid_outcomes import LAST_FEW
from ppo_repro.records import reader


def measures(run_dir: Path) -> dict[str, float]:
    """Return the outcome, explained = 1 - Var(G - V) / Var(G), and rms(G - V) by third of the response.

    explained and rms are over the last iterations. G is the reward to go, the sum of the rewards from the token on,
    which unlike `returns` does not depend on lambda. explained is NaN if all rewards are equal; means are then over the
    other seeds.
    """
    count = len(reader.read_iterations(run_dir))
    names = ["iteration", "sequence", "position", "values", "rewards"]
    tokens = reader.read_tokens(run_dir, iterations=range(max(0, count - LAST_FEW), count), columns=names)
    rewards = tokens["rewards"].astype(np.float64)
    response = [tokens["iteration"], tokens["sequence"]]
    to_go = rewards[::-1].groupby([key[::-1] for key in response]).cumsum()[::-1]
    error = to_go - tokens["values"]
    third = 3 * tokens["position"] // tokens.groupby(["iteration", "sequence"])["position"].transform("size")
    errors = {f"error_{i}": float(np.sqrt((error[third == i] ** 2).mean())) for i in range(3)}
    explained = 1.0 - float(error.var()) / float(to_go.var()) if to_go.nunique() > 1 else np.nan
    return outcome(run_dir) | {"explained": explained} | errors


if __name__ == "__main__":
    settings_study(
        __file__,
        axis="critic",
        measure="mean_accuracy",
        title="accuracy, mean over training",
        against="usual",
        columns={
            "at the end": ("eval_accuracy", None),
            "explained variance": ("explained", "{:.2f}"),
            "error, first third": ("error_0", "{:.3f}"),
            "error, second third": ("error_1", "{:.3f}"),
            "error, last third": ("error_2", "{:.3f}"),
        },
        measures=measures,
    )
