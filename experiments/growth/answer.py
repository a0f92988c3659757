"""How fast does one flipped bit grow? `python -m experiments.growth.answer [GRID]`; see `experiments/answers.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from experiments.answers import Labels, Twin, outcome, study
from ppo_repro.analysis import figures
from ppo_repro.analysis.mean_text import mean_and_interval
from ppo_repro.records import reader

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALL = 1e-3  # nats, rms: below, the growth is exponential, and its rate is fitted
LARGE = 1e-2  # nats, rms: from here on the log-probs of the twins are visibly different


def distance(run_dir: Path, twin: Path, iteration: int) -> tuple[float, bool, bool]:
    """Return for one iteration: rms difference of log-probs (nats), whether a token differs, whether a score differs.

    The rms is over the tokens that both twins sampled after the same tokens. Half of its square estimates the KL
    between the twins, a little too low, because the tokens at which the twins part are missing.
    """
    keys = ["sequence", "position"]
    names = [*keys, "token_id", "old_logprobs"]
    a, b = (reader.read_tokens(run, iterations=[iteration], columns=names) for run in (run_dir, twin))
    both = a.merge(b, on=keys, how="outer", suffixes=("", "_twin")).sort_values(keys)
    parted = (both["token_id"] != both["token_id_twin"]).groupby(both["sequence"]).cummax()
    delta = (both["old_logprobs"].astype(float) - both["old_logprobs_twin"].astype(float))[~parted]
    scores = [
        reader.read_sequences(run, iterations=[iteration], columns=["scores"])["scores"] for run in (run_dir, twin)
    ]
    return float(np.sqrt((delta**2).mean())), bool(parted.any()), not scores[0].equals(scores[1])


def first(flags: Sequence[bool]) -> int:
    """Return the first iteration whose flag is true, or the number of iterations if there is none."""
    return next((i for i, flag in enumerate(flags) if flag), len(flags))


def distances(run_dir: Path, twin: Path) -> dict[str, float]:
    """Return the distances of a run from its twin without a flip."""
    rms, tokens, scores = zip(
        *(distance(run_dir, twin, i) for i in range(len(reader.read_iterations(run_dir)))), strict=True
    )
    return {
        "first_token": first(tokens),
        "first_score": first(scores),
        "large": first([value > LARGE for value in rms]),
        "accuracy_apart": abs(outcome(run_dir)["eval_accuracy"] - outcome(twin)["eval_accuracy"]),
        **{f"rms_{i:02d}": value for i, value in enumerate(rms)},
    }


def without_flip(labels: Labels) -> Labels | None:
    """Return the labels of a flipped run's twin, the run without a flip."""
    return None if labels["flip"] == "none" else {**labels, "flip": "none"}


def iterations_per_decade(row: pd.Series) -> float:
    """Return the iterations of a tenfold growth of the distance, by least squares below SMALL; NaN below 3 points."""
    rms = row[[name for name in row.index if name.startswith("rms_")]].to_numpy(np.float64)
    fitted = np.flatnonzero((rms > 0) & (rms < SMALL))
    return 1.0 / float(np.polyfit(fitted, np.log10(rms[fitted]), 1)[0]) if len(fitted) >= 3 else np.nan


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    rows = []
    for (setting, flip), group in results[results["flip"] != "none"].groupby(["setting", "flip"], sort=False):
        row = {"setting": setting, "flipped": flip}
        for name, title in (("first_token", "first other token"), ("first_score", "first other score")):
            row[f"{title}, iteration"] = mean_and_interval(group[name], "{:.1f}")
        decades = group.apply(iterations_per_decade, axis=1).dropna()
        row["iterations for a factor of 10"] = mean_and_interval(decades, "{:.1f}") if len(decades) else ""
        row["rms, iteration 1, nats"] = f"{group['rms_01'].median():.0e}"
        row[f"above {LARGE:g} nats, iteration"] = mean_and_interval(group["large"], "{:.1f}")
        row["accuracy apart at the end"] = mean_and_interval(group["accuracy_apart"])
        rows.append(row)
    return [pd.DataFrame(rows)]


def figure(results: pd.DataFrame) -> Axes:
    names = sorted(name for name in results.columns if name.startswith("rms_"))
    settings = list(dict.fromkeys(results["setting"]))
    axes = figures.new_axes(4.5 * len(settings), 3.3, len(settings))
    for setting, axis in zip(settings, axes, strict=True):
        for flip, color in (("bit", "#0072b2"), ("token", "#d55e00")):
            group = results[(results["setting"] == setting) & (results["flip"] == flip)]
            for values in group[names].to_numpy(np.float64):
                axis.semilogy(np.where(values > 0, values, np.nan), color=color, alpha=0.3)
            axis.semilogy(group[names].median().replace(0, np.nan).to_numpy(), color=color, linewidth=2, label=flip)
        axis.set_title(setting)
        axis.set_xlabel("iteration")
        axis.set_ylim(1e-9, 10)
    axes[0].set_ylabel("rms difference of log-probs, nats")
    axes[0].legend(title="flipped")
    return axes[0]


if __name__ == "__main__":
    study(__file__, tables, figure, twin=Twin(without_flip, distances))
