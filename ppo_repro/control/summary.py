"""What a finished control run says about itself, computed from its records alone; never imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.records import reader


@dataclass(frozen=True)
class ControlSummary:
    """The figures of one run; the counts are over all its iterations. Returns are undiscounted."""

    run_dir: str
    fingerprint: str
    status: str
    iterations: int
    tokens: int  # environment steps
    episodes: int
    unequal_old_rollout_logprobs: int
    max_abs_old_rollout: float
    first_minibatch_tokens: int
    unequal_values: int
    unequal_first_ratios: int
    last_100_return: float  # mean of the last 100 training episodes; of all where there are fewer
    eval_before: float  # likeliest actions; NaN where no episodes are configured
    eval_after: float
    seconds: dict[str, float]  # by phase


def summarise(run_dir: Path, seconds: dict[str, float] | None = None) -> ControlSummary:
    """Summary of a complete run; `seconds` replaces the phases found in the records."""
    manifest = reader.open_manifest(run_dir)
    rows = reader.read_iterations(run_dir)
    phases = {c.removeprefix("seconds_"): float(rows[c].sum()) for c in rows.columns if c.startswith("seconds_")}
    return ControlSummary(
        run_dir=str(run_dir),
        fingerprint=manifest.fingerprint,
        status=manifest.status,
        iterations=len(rows),
        tokens=int(rows["tokens"].sum()),
        episodes=int(rows["episodes"].sum()),
        unequal_old_rollout_logprobs=int(rows["unequal_old_rollout_logprobs"].sum()),
        max_abs_old_rollout=float(rows["max_abs_old_rollout"].max()),
        first_minibatch_tokens=int(rows["first_minibatch_tokens"].sum()),
        unequal_values=int(rows["unequal_values"].sum()),
        unequal_first_ratios=int(rows["unequal_first_ratios"].sum()),
        last_100_return=float(manifest.final["last_100_return"]),
        eval_before=float(rows["eval_return"].iloc[0]),
        eval_after=float(manifest.final["eval_return"]),
        seconds=seconds if seconds is not None else phases,
    )


def verdicts(summary: ControlSummary) -> list[str]:
    """The summary in words, one sentence per line."""
    s = summary
    compared = [
        (s.unequal_old_rollout_logprobs, s.tokens, "training log-probs differ from those while sampling"),
        (s.unequal_first_ratios, s.first_minibatch_tokens, "first ratios are not exactly 1"),
        (s.unequal_values, s.first_minibatch_tokens, "recomputed values differ from the recorded ones"),
    ]
    change = f"likeliest actions: return {s.eval_before:.2f} -> {s.eval_after:.2f}"
    evaluated = [] if math.isnan(s.eval_after) else [change]
    return [
        f"mean return of the last 100 training episodes {s.last_100_return:.2f}",
        *evaluated,
        f"{s.iterations} iterations, {s.tokens:,} environment steps, {s.episodes:,} episodes",
        *(f"{unequal:,} of {total:,} {what}" for unequal, total, what in compared),
        f"largest |old - rollout| log-prob difference {s.max_abs_old_rollout:.3g} nats",
    ]


def speeds(summary: ControlSummary) -> list[str]:
    """Seconds by phase, with environment steps per second where a phase handles steps."""
    lines = []
    for phase, seconds in summary.seconds.items():
        handles_steps = phase in {"rollout", "forward", "update"} and seconds > 0
        rate = f"  {summary.tokens / seconds:,.0f} steps/s" if handles_steps else ""
        lines.append(f"{phase:<12}{seconds:8.1f} s{rate}")
    return lines


def iteration_lines(run_dir: Path, count: int) -> pd.DataFrame:
    """The columns worth a glance of up to `count` iterations, evenly spread, the first and last included."""
    columns = [
        "iteration", "tokens", "episodes", "episode_return_mean", "entropy", "explained_variance",
        "unequal_old_rollout_logprobs", "unequal_first_ratios",
    ]  # fmt: skip
    rows = reader.read_iterations(run_dir, columns=columns, allow_incomplete=True)
    if len(rows) <= count:
        return rows
    keep = sorted({round(i * (len(rows) - 1) / (count - 1)) for i in range(count)})
    return rows.iloc[keep]
