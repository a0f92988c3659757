"""Does a real model learn, and what does a bfloat16 sampler cost it? `python -m experiments.smollm2.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from experiments.answers import outcome, settings_study
from ppo_repro.analysis import figures
from ppo_repro.records import reader

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def measures(run_dir: Path) -> dict[str, float]:
    """Return the outcome, the share of unequal tokens, and sampled_I.

    A token is unequal if its log-prob differs between sampler and trainer. sampled_I is the accuracy of the sampled
    responses in iteration I.
    """
    tokens = reader.read_tokens(run_dir, columns=["old_logprobs", "rollout_logprobs"])
    found = outcome(run_dir)
    found["unequal"] = float((tokens["old_logprobs"] != tokens["rollout_logprobs"]).mean())
    sampled = reader.read_iterations(run_dir, columns=["accuracy"])["accuracy"]
    return found | {f"sampled_{i:02d}": float(value) for i, value in enumerate(sampled)}


def figure(results: pd.DataFrame) -> Axes:
    (axes,) = figures.new_axes(8.0, 3.6)
    names = sorted(name for name in results.columns if name.startswith("sampled_"))
    for sampler, group in results.groupby("sampler", sort=False):
        axes.plot(range(1, len(names) + 1), group[names].mean().to_numpy(), "o-", label=str(sampler))
    axes.set(xlabel="iteration", ylabel="accuracy of sampled responses")
    axes.legend()
    return axes


if __name__ == "__main__":
    settings_study(
        __file__,
        axis="sampler",
        measure="eval_accuracy",
        title="accuracy at the end",
        against="deterministic",
        columns={
            "before": ("start", "{:.3f}"),
            "KL, nats a response": ("ref_kl_per_sequence", "{:.2f}"),
            "entropy, nats a token": ("entropy", "{:.2f}"),
            "k3, nats a token": ("k3", "{:.1e}"),
            "unequal log-probs": ("unequal", "{:.1%}"),
        },
        measures=measures,
        figure=figure,
    )
