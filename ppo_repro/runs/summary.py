"""What a finished run says about itself, computed from its records alone; never imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pandas as pd

from ppo_repro.config.algorithm import KLInReward
from ppo_repro.config.reward import ExactMatch, Verifier
from ppo_repro.records import reader, times
from ppo_repro.records.accuracy import Accuracy, sentence
from ppo_repro.records.accuracy import read as read_accuracy
from ppo_repro.records.config_file import load_recorded_config
from ppo_repro.records.manifest import Manifest

PHASES = ("rollout", "forward", "update")  # those that handle tokens

SHOWN = 0.05  # seconds; a shorter phase rounds to 0.0
MANY_CUT = 0.5  # share of the responses cut at the limit from which a person hears of it


@dataclass(frozen=True)
class Counts:
    """The figures of one run of any kind; the counts are over all its iterations."""

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
    seconds: dict[str, float]  # by phase


Summary = TypeVar("Summary")


@dataclass(frozen=True)
class SummaryKind(Generic[Summary]):
    """How the runs of one kind are summed up."""

    columns: tuple[str, ...]  # of the table `iterations`, worth a glance
    unit: str  # what tokens are
    summarise: Callable[[Path, dict[str, float] | None], Summary]
    verdicts: Callable[[Summary], list[str]]  # the summary in words, one sentence per line


def counts(run_dir: Path, manifest: Manifest, rows: pd.DataFrame, seconds: dict[str, float] | None) -> dict[str, Any]:
    """The fields of `Counts` from the table `iterations`; `seconds` replaces the phases found there."""
    totals = ("tokens", "unequal_old_rollout_logprobs", "first_minibatch_tokens", "unequal_values")
    if seconds is None:
        seconds = times.by_phase(run_dir, manifest, times.phases_of(rows))
    return {
        "run_dir": str(run_dir),
        "fingerprint": manifest.fingerprint,
        "status": manifest.status,
        "iterations": len(rows),
        **{name: int(rows[name].sum()) for name in (*totals, "unequal_first_ratios")},
        "max_abs_old_rollout": float(rows["max_abs_old_rollout"].max()),
        "seconds": seconds,
    }


def agreement(counts: Counts, anchor: str, has_value_model: bool) -> list[str]:
    """How far sampler and trainer agree, in words; nothing is said of values where there is no value model."""
    compared = [
        (counts.unequal_old_rollout_logprobs, counts.tokens, "training log-probs differ from the sampler's"),
        (
            counts.unequal_first_ratios,
            counts.first_minibatch_tokens,
            f"first ratios (anchor {anchor}) are not exactly 1",
        ),
    ]
    if has_value_model:
        values = "recomputed values differ from the recorded ones"
        compared.append((counts.unequal_values, counts.first_minibatch_tokens, values))
    return [
        *(f"{unequal:,} of {total:,} {what}" for unequal, total, what in compared),
        f"largest |old - rollout| log-prob difference {counts.max_abs_old_rollout:.3g} nats",
    ]


def speeds(counts: Counts, unit: str) -> list[str]:
    """Seconds by phase, with tokens per second where a phase handles tokens; without phases that would show 0.0 s."""
    lines = []
    for phase, seconds in counts.seconds.items():
        if seconds < SHOWN and phase not in PHASES:
            continue
        rate = f"  {counts.tokens / seconds:,.0f} {unit}/s" if phase in PHASES and seconds > 0 else ""
        lines.append(f"{phase:<12}{seconds:8.1f} s{rate}")
    return lines


def iteration_lines(run_dir: Path, columns: tuple[str, ...], count: int) -> pd.DataFrame:
    """Some columns of up to `count` iterations, evenly spread, the first and last included."""
    if "accuracy" in columns and not has_answers(run_dir):
        columns = tuple(name for name in columns if "accuracy" not in name)
    rows = reader.read_iterations(run_dir, columns=columns, allow_incomplete=True)
    return rows.iloc[sorted({round(i * (len(rows) - 1) / (count - 1)) for i in range(count)})]


@dataclass(frozen=True)
class LanguageSummary(Counts):
    """The figures of one language run."""

    reward_first: float
    reward_last: float
    accuracy_before: float
    accuracy_after: float
    score_before: float  # mean score of the held-out responses, greedy
    score_after: float
    cut_fraction: float  # of all responses, cut at rollout.max_response_tokens
    has_answers: bool  # without answers and without a verifier no response is right or wrong
    numerical_accuracy: Accuracy | None  # of the log-probs at the start; None where it was not measured


def summarise(run_dir: Path, seconds: dict[str, float] | None = None) -> LanguageSummary:
    """Summary of a complete language run; `seconds` replaces the phases found in the records."""
    manifest = reader.open_manifest(run_dir)
    rows = reader.read_iterations(run_dir)
    return LanguageSummary(
        **counts(run_dir, manifest, rows, seconds),
        reward_first=float(rows["reward_mean"].iloc[0]),
        reward_last=float(rows["reward_mean"].iloc[-1]),
        accuracy_before=float(rows["eval_accuracy"].iloc[0]),
        accuracy_after=float(manifest.final["eval_accuracy"]),
        score_before=float(rows["eval_score"].iloc[0]),
        score_after=float(manifest.final["eval_score"]),
        cut_fraction=float((rows["truncated_fraction"] * rows["sequences"]).sum() / rows["sequences"].sum()),
        has_answers=has_answers(run_dir),
        numerical_accuracy=read_accuracy(run_dir, manifest),
    )


def has_answers(run_dir: Path) -> bool:
    """Whether a response of a language run can be right: its prompts have answers, or the task a verifier."""
    terms = load_recorded_config(run_dir).reward.terms
    answers = reader.read_sequences(run_dir, columns=["answer"], iterations=[0], allow_incomplete=True)["answer"]
    return any(isinstance(term, Verifier) for term in terms) or bool((answers != "").any())


def cut_at_the_limit(fraction: float) -> str:
    """That many responses were cut, in words."""
    return f"{fraction:.0%} of the responses were cut at rollout.max_response_tokens; raise it"


def _change(what: str, before: float, after: float) -> str:
    direction = "rose" if after > before else "fell" if after < before else "stayed"
    return f"{what} {direction} from {before:.3f} to {after:.3f} (greedy)"


def _verdicts(summary: LanguageSummary) -> list[str]:
    config = load_recorded_config(summary.run_dir)
    accuracy = _change("held-out accuracy", summary.accuracy_before, summary.accuracy_after)
    score = _change("held-out score", summary.score_before, summary.score_after)
    # a reward of the user's own is what was trained, and its responses need not be equal to an answer
    own = not summary.has_answers or any(not isinstance(term, ExactMatch) for term in config.reward.terms)
    penalty = ", KL penalty included," if isinstance(config.kl, KLInReward) and config.kl.kl_coef else ""
    return [
        *([score] if own else []),
        *([accuracy] if summary.has_answers else []),
        f"mean reward per response{penalty} {summary.reward_first:.3f} -> {summary.reward_last:.3f}",
        *([cut_at_the_limit(summary.cut_fraction)] if summary.cut_fraction > MANY_CUT else []),
        f"{summary.iterations} iterations, {summary.tokens:,} response tokens",
        *agreement(summary, config.ppo.ratio_anchor, config.value.kind != "none"),
        *([] if summary.numerical_accuracy is None else [sentence(summary.numerical_accuracy)]),
    ]


LANGUAGE_RUNS = SummaryKind(
    columns=(
        "iteration", "tokens", "score_mean", "reward_mean", "accuracy", "entropy", "ref_kl_per_token",
        "explained_variance", "unequal_old_rollout_logprobs", "eval_accuracy",
    ),
    unit="tokens",
    summarise=summarise,
    verdicts=_verdicts,
)  # fmt: skip


def sample_lines(run_dir: Path, iteration: int, count: int) -> list[str]:
    """The first `count` responses of an iteration, one per line."""
    columns = ["prompt", "response", "answer", "scores", "finish_reason"]
    rows = reader.read_sequences(run_dir, iterations=[iteration], columns=columns, allow_incomplete=True)
    return [
        f"  {row.prompt!r} -> {row.response!r} (answer {row.answer!r}, {row.finish_reason}, score {row.scores:g})"
        for row in rows.head(count).itertuples()
    ]
