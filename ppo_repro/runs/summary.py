"""What a finished run says about itself, computed from its records alone; never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.records import reader

PROFILED = ("rollout", "forward", "update")


@dataclass(frozen=True)
class Summary:
    """The figures of one run; the counts are over all its iterations."""

    run_dir: str
    fingerprint: str
    status: str
    iterations: int
    tokens: int
    unequal_old_rollout_logprobs: int
    max_abs_old_rollout: float
    first_minibatch_tokens: int
    unequal_values: int
    unequal_first_ratios: int
    reward_first: float
    reward_last: float
    accuracy_before: float
    accuracy_after: float
    seconds: dict[str, float]  # by phase


def summarise(run_dir: Path, seconds: dict[str, float] | None = None) -> Summary:
    """Summary of a complete run; `seconds` replaces the phases found in the records."""
    manifest = reader.open_manifest(run_dir)
    rows = reader.read_iterations(run_dir)
    phases = {c.removeprefix("seconds_"): float(rows[c].sum()) for c in rows.columns if c.startswith("seconds_")}
    return Summary(
        run_dir=str(run_dir),
        fingerprint=manifest.fingerprint,
        status=manifest.status,
        iterations=len(rows),
        tokens=int(rows["tokens"].sum()),
        unequal_old_rollout_logprobs=int(rows["unequal_old_rollout_logprobs"].sum()),
        max_abs_old_rollout=float(rows["max_abs_old_rollout"].max()),
        first_minibatch_tokens=int(rows["first_minibatch_tokens"].sum()),
        unequal_values=int(rows["unequal_values"].sum()),
        unequal_first_ratios=int(rows["unequal_first_ratios"].sum()),
        reward_first=float(rows["reward_mean"].iloc[0]),
        reward_last=float(rows["reward_mean"].iloc[-1]),
        accuracy_before=float(rows["eval_accuracy"].iloc[0]),
        accuracy_after=float(manifest.final["eval_accuracy"]),
        seconds=seconds if seconds is not None else phases,
    )


def verdicts(summary: Summary, anchor: str, has_value_model: bool) -> list[str]:
    """The summary in words, one sentence per line; nothing is said of values where there is no value model."""
    s = summary
    change = s.accuracy_after - s.accuracy_before
    direction = "rose" if change > 0 else "fell" if change < 0 else "stayed"
    compared = [
        (s.unequal_old_rollout_logprobs, s.tokens, "training log-probs differ from the sampler's"),
        (s.unequal_first_ratios, s.first_minibatch_tokens, f"first ratios (anchor {anchor}) are not exactly 1"),
    ]
    if has_value_model:
        compared.append((s.unequal_values, s.first_minibatch_tokens, "recomputed values differ from the recorded ones"))
    mismatch = [f"{unequal:,} of {total:,} {what}" for unequal, total, what in compared]
    return [
        f"held-out accuracy {direction} from {s.accuracy_before:.3f} to {s.accuracy_after:.3f} (greedy)",
        f"mean reward per response {s.reward_first:.3f} -> {s.reward_last:.3f}",
        f"{s.iterations} iterations, {s.tokens:,} response tokens",
        *mismatch,
        f"largest |old - rollout| log-prob difference {s.max_abs_old_rollout:.3g} nats",
    ]


def speeds(summary: Summary) -> list[str]:
    """Seconds by phase, with sampled tokens per second where a phase handles tokens."""
    lines = []
    for phase, seconds in summary.seconds.items():
        handles_tokens = phase in {"rollout", "forward", "update"} and seconds > 0
        rate = f"  {summary.tokens / seconds:,.0f} tokens/s" if handles_tokens else ""
        lines.append(f"{phase:<12}{seconds:8.1f} s{rate}")
    return lines


@dataclass(frozen=True)
class Profile:
    """What a profiled run made of its machine, over all iterations."""

    tokens_per_second: float  # sampled tokens over rollout, forward and update
    peak_fraction: dict[str, float]  # by phase, and `all` three together
    memory_peak: float  # bytes


def profile(run_dir: Path) -> Profile:
    """From the records of a run with --profile; shares are means weighted by time, NaN where none was measured."""
    rows = reader.read_iterations(run_dir)
    seconds = {phase: rows[f"seconds_{phase}"] for phase in PROFILED}
    work = {phase: rows[f"peak_fraction_{phase}"] * seconds[phase] for phase in PROFILED}
    fractions = {phase: float(work[phase].sum(skipna=False) / seconds[phase].sum()) for phase in PROFILED}
    total = float(sum(s.sum() for s in seconds.values()))
    fractions["all"] = float(sum(w.sum(skipna=False) for w in work.values())) / total
    return Profile(float(rows["tokens"].sum()) / total, fractions, float(rows["memory_peak"].max()))


def profile_lines(found: Profile) -> list[str]:
    """The profile in words."""
    shares = ", ".join(f"{phase} {share:.1%}" for phase, share in found.peak_fraction.items())
    return [
        f"of the peak   {shares}",
        f"tokens/s    {found.tokens_per_second:8,.0f} over rollout, forward and update",
        f"memory      {found.memory_peak / 2**20:8,.0f} MiB at most",
    ]


def iteration_lines(run_dir: Path, count: int) -> pd.DataFrame:
    """The columns worth a glance of up to `count` iterations, evenly spread, the first and last included."""
    columns = [
        "iteration", "tokens", "reward_mean", "accuracy", "entropy", "ref_kl_per_token",
        "explained_variance", "unequal_old_rollout_logprobs", "eval_accuracy",
    ]  # fmt: skip
    rows = reader.read_iterations(run_dir, columns=columns, allow_incomplete=True)
    if len(rows) <= count:
        return rows
    keep = sorted({round(i * (len(rows) - 1) / (count - 1)) for i in range(count)})
    return rows.iloc[keep]


def sample_lines(run_dir: Path, iteration: int, count: int) -> list[str]:
    """The first `count` responses of an iteration, one per line."""
    columns = ["prompt", "response", "answer", "scores", "finish_reason"]
    rows = reader.read_sequences(run_dir, iterations=[iteration], columns=columns, allow_incomplete=True)
    return [
        f"  {row.prompt!r} -> {row.response!r} (answer {row.answer!r}, {row.finish_reason}, score {row.scores:g})"
        for row in rows.head(count).itertuples()
    ]
