"""What each cell of a grid came to: one number per cell and measure, read from the records of its run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.mismatch.clip_floor import clip_floor
from ppo_repro.config.algorithm import ClipObjective
from ppo_repro.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.config_file import load_recorded_config

LAST = FIRST = 5  # iterations
MEASURES = {
    "accuracy": "greedy accuracy on held-out prompts after training",
    "score": f"mean score of the sampled responses, last {LAST} iterations",
    "KL": f"KL(policy || reference), exact, seq_mean_token_sum, nats, last {LAST} iterations",
    "entropy": f"entropy of the policy, token mean, nats, last {LAST} iterations",
    "explained": f"explained variance of the value model, first {FIRST} iterations",
    "k3": "KL(rollout || old) by k3, token mean, nats, all iterations",
    "floor": "share of response tokens whose gradient the clip would remove before any step, by mismatch alone",
    "removed": "share of token visits whose policy gradient the clip removed, as TRL, verl and OpenRLHF count",
    "outside": "share of token visits whose ratio was outside the band, as CleanRL counts",
}


def clip_shares(run_dir: Path, iterations: int) -> tuple[float, float]:
    """Shares of the run's token visits without gradient, and outside the band; both 0 where nothing was clipped."""
    flags = [
        reader.read_updates(run_dir, iterations=[i], columns=["clip_flag"])["clip_flag"].value_counts()
        for i in range(iterations)
    ]
    counts = pd.concat(flags, axis=1).sum(axis=1)
    outside = counts.drop("none", errors="ignore")
    removed = outside[outside.index.str.startswith("clip_")]
    return float(removed.sum() / counts.sum()), float(outside.sum() / counts.sum())


def mismatch(run_dir: Path) -> tuple[float, float]:
    """(mean k3, clip floor) over the run's response tokens, with d = log p_old - log p_rollout in float64.

    k3 = expm1(d) - d, nats. The floor (`mismatch.clip_floor`) is 0 with the anchor old, where the first
    ratio is 1 whatever d is, and NaN where the objective has no fixed clip range.
    """
    columns = ["old_logprobs", "rollout_logprobs", "advantages"]
    tokens = reader.read_tokens(run_dir, columns=columns).astype(np.float64)
    delta = (tokens["old_logprobs"] - tokens["rollout_logprobs"]).to_numpy()
    ppo, floor = load_recorded_config(run_dir).ppo, math.nan
    if isinstance(ppo.objective, ClipObjective):
        low, high, dual = ppo.objective.clip_range, ppo.objective.clip_range_high, ppo.objective.dual_clip
        start = delta if ppo.ratio_anchor == "rollout" else np.zeros_like(delta)
        floor = clip_floor(start, tokens["advantages"].to_numpy(), low, low if high is None else high, dual)
    return float(np.mean(np.expm1(delta) - delta)), floor


def measures_of(run_dir: Path) -> dict[str, float]:
    """Every measure but the accuracy, which is in the grid's own table; explained is NaN without a value model."""
    rows = reader.read_iterations(run_dir)
    last, first = rows.tail(LAST), rows.head(FIRST)
    removed, outside = clip_shares(run_dir, len(rows))
    k3, floor = mismatch(run_dir)
    return {
        "score": float(last["score_mean"].mean()),
        "KL": float(last["ref_kl_per_sequence"].mean()),
        "entropy": float(last["entropy"].mean()),
        "explained": float(first["explained_variance"].mean()),
        "k3": k3,
        "floor": floor,
        "removed": removed,
        "outside": outside,
    }


def outcomes(grid: Path) -> pd.DataFrame:
    """One row per complete cell: point (labels of the axes), seed, fingerprint and MEASURES; UserError if none is.

    Columns `axis.NAME` hold the labels; `point` is all of them together.
    """
    table = pd.read_parquet(grid / "cells.parquet")
    table = table[table["state"] == "complete"].reset_index(drop=True)
    if table.empty:
        raise UserError(f"{grid}: has no complete cell; run `ppo-repro grid` on its file first")
    axes = [name for name in table.columns if name.startswith("axis.")]
    points = [", ".join(map(str, labels)) for labels in table[axes].itertuples(index=False)]
    cells = pd.DataFrame([measures_of(grid / str(run_dir)) for run_dir in table["run_dir"]])
    cells.insert(0, "accuracy", table["final.eval_accuracy"])
    about = table[[*axes, "seed", "fingerprint"]]
    return pd.concat([pd.Series(points, name="point"), about, cells], axis=1)
