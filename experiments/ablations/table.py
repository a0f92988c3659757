"""What a grid found: `python -m experiments.ablations.table GRID` prints one row per point of its axes, over seeds.

Mean and 95 % Student interval over seeds of the final greedy accuracy on held-out prompts; means over seeds and the
last five iterations of score, KL(policy || reference) per response (exact, nats) and entropy (nats); shares of the
run's token visits whose policy gradient the clip removed, and whose ratio was outside the band; fingerprints.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pandas as pd
from scipy.stats import spearmanr, t

from ppo_repro.records import reader

LAST = 5  # iterations


def clip_shares(run_dir: Path) -> tuple[float, float]:
    """Shares of the run's token visits without gradient, and outside the band; NaN where the objective has no clip."""
    flags = [
        reader.read_updates(run_dir, iterations=[i], columns=["clip_flag"])["clip_flag"].value_counts()
        for i in range(len(reader.read_iterations(run_dir, columns=["iteration"])))
    ]
    counts = pd.concat(flags, axis=1).sum(axis=1)
    outside = counts.drop("none", errors="ignore")
    removed = outside[outside.index.str.startswith("clip_")]
    return float(removed.sum() / counts.sum()), float(outside.sum() / counts.sum())


def interval(values: pd.Series) -> str:
    """Mean and half width of the 95 % Student interval."""
    n = len(values)
    if n < 2:
        return f"{values.mean():.3f}"
    half = float(t.ppf(0.975, n - 1)) * values.std(ddof=1) / math.sqrt(n)
    return f"{values.mean():.3f} ± {half:.3f}"


def cells(grid: Path) -> pd.DataFrame:
    """One row per complete cell: what the table is made of."""
    table = pd.read_parquet(grid / "cells.parquet")
    table = table[table["state"] == "complete"].reset_index(drop=True)
    for index, row in table.iterrows():
        run_dir = grid / str(row["run_dir"])
        last = reader.read_iterations(run_dir).tail(LAST)
        for name in ("score_mean", "ref_kl_per_sequence", "entropy"):
            table.loc[index, name] = last[name].mean()
        table.loc[index, ["removed", "outside"]] = clip_shares(run_dir)
    return table


def rows(table: pd.DataFrame) -> pd.DataFrame:
    """One row per point of the axes."""
    axes = [name for name in table.columns if name.startswith("axis.")]
    found = []
    for labels, group in table.groupby(axes, sort=False):
        found.append(
            {
                **{axis.removeprefix("axis."): label for axis, label in zip(axes, labels, strict=True)},
                "seeds": len(group),
                "accuracy": interval(group["final.eval_accuracy"]),
                "score": f"{group['score_mean'].mean():.3f}",
                "KL": f"{group['ref_kl_per_sequence'].mean():.2f}",
                "entropy": f"{group['entropy'].mean():.2f}",
                "gradient removed": f"{group['removed'].mean():.1%}",
                "outside the band": f"{group['outside'].mean():.1%}",
                "fingerprints": group["fingerprint"].nunique(),
            }
        )
    return pd.DataFrame(found)


def main(grid: Path) -> None:
    table = cells(grid)
    shown = rows(table)
    print("| " + " | ".join(shown.columns) + " |\n|" + "---|" * len(shown.columns))
    for row in shown.to_dict("records"):
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    for share in ("removed", "outside"):
        found = spearmanr(table[share], table["final.eval_accuracy"])
        print(f"rank correlation of share {share} and accuracy over {len(table)} runs: {found.statistic:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
