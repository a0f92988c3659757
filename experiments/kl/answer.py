"""Where does each KL penalty end beside the optimum? `python -m experiments.kl.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from experiments.answers import settings_study
from experiments.optimum.exact import read
from ppo_repro.analysis import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def measures(run_dir: Path) -> dict[str, float]:
    """Return the gap to the optimum and the KL, by exact sums over all responses, as means over prompts.

    gap = 1 - (E[R] - beta KL) / maximum, for the policy and the reference, with the run's beta. KL is in nats per
    response.
    """
    found = read(run_dir)
    best, policy, reference = (
        float(np.mean([getattr(d, name) for d in found])) for name in ("optimum", "policy", "reference")
    )
    return {
        "gap": 1.0 - policy / best,
        "reference_gap": 1.0 - reference / best,
        "reward": float(np.mean([d.expected_reward for d in found])),
        "KL": float(np.mean([d.kl for d in found])),
    }


def figure(results: pd.DataFrame) -> Axes:
    axes = figures.settings_figure(results.assign(point=results["penalty"]), "gap")
    axes.set_xlabel("what the objective falls short of the optimum, relative to it; 0 is the optimum")
    return axes


if __name__ == "__main__":
    settings_study(
        __file__,
        axis="penalty",
        measure="gap",
        title="gap to the optimum",
        against="k1 in the reward",
        columns={
            "gap of the reference": ("reference_gap", "{:.3f}"),
            "expected reward": ("reward", "{:.3f}"),
            "KL, nats a response": ("KL", "{:.3f}"),
        },
        measures=measures,
        figure=figure,
    )
