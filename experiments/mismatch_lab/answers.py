"""The answers of the grids in this folder: `python -m experiments.mismatch_lab.answers GRID` prints them.

First one row per point: mean and 95 % Student interval of the scores over seeds, collapsed runs, and means of the other
measures. Then the scores of each point minus those of the first one with the same learning rate, paired by seed: of the
sampled responses, which a disturbed or old sampler gives, and of the greedy ones of the last policy, undisturbed.
`--csv` writes the measures of every cell, `--figure` draws their scores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import figures
from analysis.grids.outcomes import complete_cells
from analysis.grids.table import comparisons, interval, markdown
from analysis.mismatch.routes import ROUTED, flips, table_of
from ppo_repro.errors import UserError
from ppo_repro.records import reader

LAST = 3  # iterations whose mean is the end of a run
MEASURES = {
    "score": f"mean score of the sampled responses, last {LAST} iterations",
    "first": "the same, first iteration",
    "greedy": "mean score of greedy responses to held-out prompts, after the last iteration",
    "greedy_first": "the same, before the first iteration",
    "k3": "KL(sampler || trainer) by k3, nats, token mean, all iterations",
    "k3_last": f"the same, last {LAST} iterations",
    "entropy": f"entropy of the policy, nats, token mean, last {LAST} iterations",
    "length": f"tokens of a response, last {LAST} iterations",
    "flipped": "share of tokens whose experts are other ones in the trainer; NaN without recorded routes",
    "flip_rms": "rms difference of their log-probs, nats",
    "same_rms": "the same of tokens without a flip in their response so far",
    "flip_k3": "share of the sum of k3 on flipped tokens",
}
RATE = "axis.ppo.learning_rate"
SAME = 1e-9  # scores are whole 24ths; means of equal sums differ in the last bits


def of_run(run_dir: Path) -> dict[str, float]:
    """MEASURES of one run; UserError where it has fewer than LAST iterations."""
    rows = reader.read_iterations(run_dir)
    if len(rows) < LAST:
        raise UserError(f"{run_dir}: has {len(rows)} iterations; the measures need at least {LAST}")
    end = rows.tail(LAST)
    tokens = reader.read_tokens(run_dir, columns=["iteration", "old_logprobs", "rollout_logprobs"])
    delta = tokens["old_logprobs"].astype(np.float64) - tokens["rollout_logprobs"].astype(np.float64)
    k3 = np.expm1(delta) - delta
    return {
        "score": float(end["score_mean"].mean()),
        "first": float(rows["score_mean"].iloc[0]),
        **_greedy(run_dir),
        "k3": float(k3.mean()),
        "k3_last": float(k3[tokens["iteration"] >= len(rows) - LAST].mean()),
        "entropy": float(end["entropy"].mean()),
        "length": float(end["response_length_mean"].mean()),
        **_of_routes(run_dir),
    }


def _greedy(run_dir: Path) -> dict[str, float]:
    held_out = reader.read_evaluations(run_dir, columns=["iteration", "scores"])
    means = held_out.groupby("iteration")["scores"].mean()
    return {"greedy": float(means.iloc[-1]), "greedy_first": float(means.iloc[0])}


def _of_routes(run_dir: Path) -> dict[str, float]:
    if not reader.read_tokens(run_dir, iterations=[0], columns=["policy_routes"])["policy_routes"].notna().all():
        return dict.fromkeys(("flipped", "flip_rms", "same_rms", "flip_k3"), float("nan"))
    tokens = reader.read_tokens(run_dir, columns=ROUTED)
    routes, found = table_of(tokens), flips(tokens)
    rms, k3 = routes["rms_delta"], np.expm1(found["delta"]) - found["delta"]
    return {
        "flipped": routes.loc["flipped", "share"],
        "flip_rms": rms["flipped"],
        "same_rms": rms["same"],
        "flip_k3": float(k3[found["route"] == "flipped"].sum() / k3.sum()) if k3.any() else float("nan"),
    }


def of_grid(grid: Path) -> pd.DataFrame:
    """One row per complete cell: point, labels of the axes, seed, fingerprint and MEASURES; UserError without any."""
    cells = complete_cells(grid)
    measures = pd.DataFrame([of_run(grid / str(run_dir)) for run_dir in cells["run_dir"]])
    axes = [name for name in cells.columns if name.startswith("axis.")]
    return pd.concat([cells[["point", *axes, "seed", "fingerprint"]], measures], axis=1)


def rows(cells: pd.DataFrame) -> pd.DataFrame:
    """One row per point."""
    table = []
    for point, group in cells.groupby("point", sort=False):
        row = {"point": point, "seeds": len(group), "score": interval(group["score"])}
        row["collapsed"] = f"{int((group['score'] < group['first']).sum())} of {len(group)}"
        row["greedy"] = interval(group["greedy"])
        row["greedy collapsed"] = f"{int((group['greedy'] < group['greedy_first'] - SAME).sum())} of {len(group)}"
        row |= {"k3": f"{group['k3'].mean():.1e}", "k3, end": f"{group['k3_last'].mean():.1e}"}
        row |= {"entropy": f"{group['entropy'].mean():.2f}", "length": f"{group['length'].mean():.1f}"}
        if group["flipped"].notna().any():
            row |= {"flipped": f"{group['flipped'].mean():.1%}"}
            row |= {name: f"{group[name].mean():.1e}" for name in ("flip_rms", "same_rms")}
            row |= {"k3 of flipped": f"{group['flip_k3'].mean():.0%}"}
        table.append(row)
    return pd.DataFrame(table)


def differences(cells: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Each point minus the first one of its learning rate, paired by seed: mean, 95 % interval, p of the t-test."""
    groups = [group for _, group in cells.groupby(RATE, sort=False)] if RATE in cells else [cells]
    found = [comparisons(group, measure, str(group["point"].iloc[0])) for group in groups]
    table = pd.concat(found, ignore_index=True)
    return pd.DataFrame(
        {
            "point": table["point"],
            f"{measure}, minus without mismatch, 95 %": [
                f"{row.difference:+.3f} [{row.low:+.3f}, {row.high:+.3f}]" for row in table.itertuples()
            ],
            "p": [f"{p:.3f}" for p in table["p"]],
        }
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; exit code 2 and one line on a user error."""
    parser = argparse.ArgumentParser(description="answers of a grid of this folder")
    parser.add_argument("grid", type=Path, help="folder of a grid")
    parser.add_argument("--csv", type=Path, help="also write the measures of all cells to this file")
    parser.add_argument("--figure", type=Path, help="also draw the scores of all cells in this SVG file")
    parser.add_argument("--drawn", choices=["score", "greedy"], default="score", help="which scores; default: score")
    arguments = parser.parse_args(argv)
    try:
        cells = of_grid(arguments.grid)
        print(markdown(rows(cells)), *(markdown(differences(cells, m)) for m in ("score", "greedy")), sep="\n\n")
        if arguments.csv is not None:
            cells.drop(columns="point").to_csv(arguments.csv, index=False, float_format="%.6g")
        if arguments.figure is not None:
            axes = figures.settings(cells, arguments.drawn)
            axes.set_xlabel(MEASURES[arguments.drawn])
            arguments.figure.write_text(figures.svg(axes), encoding="utf-8")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
