"""What a finished control run says about itself, computed from its records alone; never imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.records import reader
from ppo_repro.runs.summary import Counts, SummaryKind, agreement, counts


@dataclass(frozen=True)
class ControlSummary(Counts):
    """The figures of one control run; its tokens are environment steps. Returns are undiscounted."""

    episodes: int
    last_100_return: float  # mean of the last 100 training episodes; of all where there are fewer
    eval_before: float  # likeliest actions; NaN where no episodes are configured
    eval_after: float


def summarise(run_dir: Path, seconds: dict[str, float] | None = None) -> ControlSummary:
    """Summary of a complete control run; `seconds` replaces the phases found in the records."""
    manifest = reader.open_manifest(run_dir)
    rows = reader.read_iterations(run_dir)
    return ControlSummary(
        **counts(run_dir, manifest, rows, seconds),
        episodes=int(rows["episodes"].sum()),
        last_100_return=float(manifest.final["last_100_return"]),
        eval_before=float(rows["eval_return"].iloc[0]),
        eval_after=float(manifest.final["eval_return"]),
    )


def _verdicts(summary: ControlSummary) -> list[str]:
    change = f"likeliest actions: return {summary.eval_before:.2f} -> {summary.eval_after:.2f}"
    return [
        f"mean return of the last 100 training episodes {summary.last_100_return:.2f}",
        *([] if math.isnan(summary.eval_after) else [change]),
        f"{summary.iterations} iterations, {summary.tokens:,} environment steps, {summary.episodes:,} episodes",
        *agreement(summary, "rollout", has_value_model=True),
    ]


CONTROL_RUNS = SummaryKind(
    columns=(
        "iteration", "tokens", "episodes", "episode_return_mean", "entropy", "explained_variance",
        "unequal_old_rollout_logprobs", "unequal_first_ratios",
    ),
    unit="steps",
    summarise=summarise,
    verdicts=_verdicts,
)  # fmt: skip
