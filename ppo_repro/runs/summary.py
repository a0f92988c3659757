"""Summarise a finished run of any kind from its records alone, without torch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ppo_repro.config.algorithm import KLInReward
from ppo_repro.config.kinds import CONTROL, DPO, LANGUAGE, Kind
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tasks import ExactMatch
from ppo_repro.records import reader
from ppo_repro.records.notes import by_phase, phases_of
from ppo_repro.runs.results import (
    AgreementCounts,
    Change,
    ControlResults,
    DPOFigures,
    LanguageResults,
    PPOResults,
    read_results,
)
from ppo_repro.statistics.draws import Draws

PHASES = ("rollout", "forward", "update")  # phases that handle tokens
SHOWN = 0.05  # seconds; a shorter phase rounds to 0.0
MANY_CUT = 0.5  # share of the responses cut at the limit above which a person hears of it
UNITS: Mapping[Kind, str] = {LANGUAGE: "tokens", CONTROL: "steps", DPO: "pairs"}  # the meaning of a token
# the shown columns of the table `iterations`; together not wider than a terminal of 80 columns
COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    LANGUAGE: ("iteration", "score_mean", "eval_score", "entropy", "ref_kl_per_token", "explained_variance"),
    CONTROL: ("iteration", "episode_return_mean", "eval_return", "entropy", "explained_variance"),
    DPO: ("iteration", "loss", "margin", "eval_margin", "eval_pair_accuracy", "eval_accuracy"),
}


@dataclass(frozen=True)
class Summary:
    """A complete run in figures by name, which `--json` prints, and in sentences, one per line."""

    figures: dict[str, Any]
    sentences: list[str]
    speeds: list[str]


class Line(NamedTuple):
    """A line about a run; `kind` says whether a promise holds, something differs, or the line is a fact."""

    kind: Literal["holds", "differs", "fact"]
    text: str


def summarise(run_dir: Path, seconds: dict[str, float] | None = None) -> Summary:
    """Return the summary of a complete run. `seconds` by phase replace the recorded seconds."""
    recorded = reader.open_manifest(run_dir)
    rows = reader.read_iterations(run_dir, recorded=recorded)
    results = read_results(run_dir, recorded, rows)
    iterations, tokens = len(rows), int(rows["pairs" if recorded.kind == DPO else "tokens"].sum())
    spent = by_phase(run_dir, recorded, phases_of(rows)) if seconds is None else seconds
    figures = {
        "run_dir": str(run_dir),
        "fingerprint": recorded.fingerprint,
        "status": recorded.status,
        "iterations": iterations,
        "tokens": tokens,
        "seconds": spent,
        **_figures(results),
    }
    match results:
        case LanguageResults():
            sentences = _language_sentences(results, iterations, tokens)
        case ControlResults():
            sentences = _control_sentences(results, iterations, tokens)
        case DPOFigures():
            sentences = _dpo_sentences(results, iterations, tokens)
    return Summary(figures, sentences, _speeds(spent, tokens, UNITS[recorded.kind]))


def _figures(results: PPOResults | DPOFigures) -> dict[str, Any]:
    """Return the results by their names in `--json`."""
    if isinstance(results, DPOFigures):
        return asdict(results)
    counts = asdict(results.agreement)
    del counts["tokens"]  # `tokens` also counts the iterations that a fork copied
    figures = counts | asdict(results.figures)
    if isinstance(results, LanguageResults):
        figures["draws"] = _draws_figures(results.draws) if results.draws.tokens else None
    return figures


def _draws_figures(draws: Draws) -> dict[str, float]:
    return {"mean": draws.mean, "error": draws.error, "tail_probability": min(draws.tail_probabilities)}


def _speeds(seconds_of_phases: Mapping[str, float], tokens: int, unit: str) -> list[str]:
    """Return lines of seconds by phase, with tokens per second for phases that handle tokens.

    Phases that would show 0.0 s are left out.
    """
    lines = []
    for phase, seconds in seconds_of_phases.items():
        if seconds >= SHOWN or phase in PHASES:
            speed = f"{tokens / seconds:,.0f} {unit}/s" if phase in PHASES and seconds else ""
            lines.append(f"{phase:<12}{seconds:8.1f} s  {speed}".rstrip())
    return lines


def _language_sentences(results: LanguageResults, iterations: int, tokens: int) -> list[str]:
    figures = results.figures
    return [
        *(f"held-out {name} {evaluated} (greedy)" for name, evaluated in evaluations(results).items()),
        sampled_sentence(results),
        *filter(None, [cut_warning(figures.cut_fraction)]),
        f"{iterations} iterations, {tokens:,} response tokens",
        *(line.text for line in on_policy_lines(results)),
        *([] if figures.card is None else [figures.card.sentence()]),
    ]


def _control_sentences(results: ControlResults, iterations: int, tokens: int) -> list[str]:
    figures = results.figures
    evaluated = f"likeliest actions: return {figures.eval_before:.2f} -> {figures.eval_after:.2f}"
    return [
        f"mean return of the last 100 training episodes {figures.last_100_return:.2f}",
        *([] if math.isnan(figures.eval_after) else [evaluated]),
        f"{iterations} iterations, {tokens:,} environment steps, {figures.episodes:,} episodes",
        *(line.text for line in on_policy_lines(results)),
    ]


def _dpo_sentences(f: DPOFigures, epochs: int, pairs: int) -> list[str]:
    lines = [
        f"held-out pairs in the right order 0.500 -> {f.eval_pair_accuracy:.3f} ({f.eval_pairs:,} pairs)",
        f"loss {f.loss_first:.4f} -> {f.loss_last:.4f} nats, {pairs // epochs:,} pairs, {epochs} epochs, "
        f"{f.steps} steps",
    ]
    if f.accuracy_before is None:
        return lines
    return [
        f"held-out accuracy {f.accuracy_before:.3f} -> {f.accuracy_after:.3f} (greedy)",
        *lines,
        f"KL(policy || reference) {f.ref_kl_per_sequence:.4f} nats per response",
    ]


def evaluations(results: LanguageResults) -> dict[str, Change]:
    """Return by name which of score and accuracy say how good the responses to held-out prompts are.

    The score says no more than the accuracy if it is only whether the response equals the answer.
    """
    figures, terms = results.figures, results.config.reward.terms
    has_score = not figures.is_judged or any(not isinstance(term, ExactMatch) for term in terms)
    score = {"score": Change(figures.score_before, figures.score_after)} if has_score else {}
    return score | ({"accuracy": Change(figures.accuracy_before, figures.accuracy_after)} if figures.is_judged else {})


def sampled_sentence(results: LanguageResults) -> str:
    """Return a sentence on the mean score of the sampled responses, and on their mean reward if it has a KL penalty."""
    figures, kl = results.figures, results.config.kl
    text = f"sampled responses: mean score {figures.sampled_score_first:.3f} -> {figures.sampled_score_last:.3f}"
    if not isinstance(kl, KLInReward) or kl.kl_coef <= 0:
        return text
    reward = f"{figures.reward_first:.3f} -> {figures.reward_last:.3f}"
    return f"{text}; mean reward, the score minus the KL penalty, {reward}"


def cut_warning(fraction: float) -> str | None:
    """Return a sentence on the fraction of responses that reached the length limit; None if it is not large."""
    text = f"{fraction:.0%} of the responses were cut at rollout.max_response_tokens; raise it"
    return text if fraction > MANY_CUT else None


def on_policy_lines(results: PPOResults) -> list[Line]:
    """Return lines on the agreement of sampler and trainer: log-probs, ratios, values, draws, accuracy."""
    counts = results.agreement
    anchor = results.config.ppo.ratio_anchor if isinstance(results, LanguageResults) else "rollout"
    has_ratios = isinstance(results, ControlResults) or results.config.ppo.objective.kind != "policy_gradient"
    has_values = isinstance(results, ControlResults) or results.config.value.kind != "none"
    first = counts.first_minibatch_tokens
    exact = f"{first - counts.unequal_first_ratios:,} of {first:,}"
    ratios = f"{exact} first-minibatch ratios (anchor {anchor}) are exactly 1"
    values = f"{counts.unequal_values:,} of {first:,} recomputed values differ from the recorded ones"
    lines = [
        logprobs_line(counts),
        *([_counted(counts.unequal_first_ratios, ratios)] if has_ratios else []),
        *([_counted(counts.unequal_values, values)] if has_values else []),
        Line("fact", f"largest |old - rollout| log-prob difference {counts.max_abs_old_rollout:.3g} nats"),
    ]
    if isinstance(results, LanguageResults):
        draws, measured = results.draws, results.figures.numerical_accuracy
        if draws.tokens:
            lines.append(_counted(draws.is_wrong, draws.sentence()))
        lines += [Line("fact", text) for text in not_promised(results.config)]
        if measured is not None:
            lines.append(Line("differs" if measured.is_low else "fact", measured.sentence()))
    return lines


def logprobs_line(counts: AgreementCounts) -> Line:
    """Return the line on the log-probs in which sampler and trainer differ."""
    unequal = counts.unequal_old_rollout_logprobs
    return _counted(unequal, f"{unequal:,} of {counts.tokens:,} training log-probs differ from the sampler's")


def _counted(unequal: int, text: str) -> Line:
    return Line("differs" if unequal else "holds", text)


def not_promised(config: RunConfig) -> list[str]:
    """Return lines on the limits of a run whose engine promises no bits; empty for other runs."""
    engine = config.rollout.engine_without_promise
    if engine is None:
        return []
    line = f"{engine}: sampled tokens and their log-probs are recorded, not promised"
    if config.machine_dependent_setting is None:
        line += "; scores, rewards and updates follow from them bit for bit"
    return [line]


def iteration_lines(run_dir: Path, kind: Kind, count: int) -> str:
    """Return a table of up to `count` iterations, evenly spaced, with the first and the last; no empty column."""
    rows = reader.read_iterations(run_dir, columns=COLUMNS[kind], allow_incomplete=True).dropna(axis=1, how="all")
    rows = rows.iloc[sorted({round(i * (len(rows) - 1) / (count - 1)) for i in range(count)})]
    return textwrap.dedent(rows.to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="-"))


def sample_lines(run_dir: Path, iteration: int, count: int) -> list[str]:
    """Return the first `count` responses of an iteration, one per line."""
    columns = ["prompt", "response", "answer", "scores", "finish_reason"]
    rows = reader.read_sequences(run_dir, iterations=[iteration], columns=columns, allow_incomplete=True)
    return [
        f"  {row.prompt!r} -> {row.response!r} (answer {row.answer!r}, {row.finish_reason}, score {row.scores:g})"
        for row in rows.head(count).itertuples()
    ]
