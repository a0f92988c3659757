"""Summarise a finished run of any kind from its records alone, without torch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd

from ppo_repro.config.algorithm import KLInReward
from ppo_repro.config.files import CONTROL, DPO, LANGUAGE, Kind
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tasks import ExactMatch, RewardConfig, Verifier
from ppo_repro.records import reader
from ppo_repro.records.folder import load_any_recorded_config, load_recorded_config
from ppo_repro.records.manifest import Head, Manifest, load, load_head
from ppo_repro.records.notes import by_phase, phases_of, read_accuracy, read_card
from ppo_repro.statistics.draws import NONE, Draws, draws_of

PHASES = ("rollout", "forward", "update")  # phases that handle tokens
SHOWN = 0.05  # seconds; a shorter phase rounds to 0.0
MANY_CUT = 0.5  # share of the responses cut at the limit from which a person hears of it
UNITS: Mapping[Kind, str] = {LANGUAGE: "tokens", CONTROL: "steps", DPO: "pairs"}  # the meaning of a token
# the shown columns of the table `iterations`; together not wider than a terminal of 80 columns
COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    LANGUAGE: ("iteration", "score_mean", "eval_score", "entropy", "ref_kl_per_token", "explained_variance"),
    CONTROL: ("iteration", "episode_return_mean", "eval_return", "entropy", "explained_variance"),
    DPO: ("iteration", "loss", "margin", "eval_margin", "eval_pair_accuracy", "eval_accuracy"),
}
DRAWN = ("old_logprobs", "entropies", "sequence", "cumulative_probs")  # columns that say how a token was drawn

Figures = dict[str, Any]
Described = tuple[Figures, list[str]]  # figures by name, and sentences


@dataclass(frozen=True)
class Summary:
    """A complete run in figures by name, which `--json` prints, and in sentences, one per line."""

    figures: Figures
    sentences: list[str]
    speeds: list[str]


def summarise(run_dir: Path, seconds: dict[str, float] | None = None) -> Summary:
    """Return the summary of a complete run. `seconds` by phase replace the recorded seconds."""
    recorded = reader.open_manifest(run_dir)
    rows = reader.read_iterations(run_dir, recorded=recorded)
    figures: Figures = {
        "run_dir": str(run_dir),
        "fingerprint": recorded.fingerprint,
        "status": recorded.status,
        "iterations": len(rows),
        "tokens": int(rows["pairs" if recorded.kind == DPO else "tokens"].sum()),
        "seconds": by_phase(run_dir, recorded, phases_of(rows)) if seconds is None else seconds,
    }
    described = {LANGUAGE: _language, CONTROL: _control, DPO: _dpo}[recorded.kind](run_dir, recorded, rows)
    speeds = _speeds(figures["seconds"], figures["tokens"], UNITS[recorded.kind])
    return Summary({**figures, **described[0]}, described[1], speeds)


def score_of(run_dir: Path, head: Head) -> float | None:
    """Return the number by which runs of this kind are compared; None if there is none so far.

    Language: the last mean score of the held-out responses. Gymnasium: the mean return of the likeliest actions, or of
    the last episodes. DPO: the share of held-out pairs in the right order.
    """
    found: Iterable[Any] = [head.final.get(name) for name in ("eval_score", "eval_return", "last_100_return")]
    if head.num_iterations and not any(map(_is_number, found)):
        config = load_any_recorded_config(run_dir, head)
        every = config.evaluation.every if isinstance(config, RunConfig) else 1
        # a fork's origin may have been evaluated at other iterations
        last = max((head.num_iterations - 1) // every * every, head.own_iterations.start - 1)
        column = {LANGUAGE: "eval_score", CONTROL: "episode_return_mean", DPO: "eval_pair_accuracy"}[head.kind]
        read = partial(reader.read_iterations, run_dir, columns=[column], recorded=load(run_dir))
        found = (read(iterations=[index])[column].item() for index in range(last, -1, -1))
    return next((float(value) for value in found if _is_number(value)), None)


def _is_number(value: float | int | str | None) -> TypeGuard[float]:
    return value is not None and not isinstance(value, str) and not math.isnan(value)


def _speeds(by_phase: Mapping[str, float], tokens: int, unit: str) -> list[str]:
    """Return lines of seconds by phase, with tokens per second for phases that handle tokens.

    Phases that would show 0.0 s are left out.
    """
    lines = []
    for phase, seconds in by_phase.items():
        if seconds >= SHOWN or phase in PHASES:
            speed = f"{tokens / seconds:,.0f} {unit}/s" if phase in PHASES and seconds else ""
            lines.append(f"{phase:<12}{seconds:8.1f} s  {speed}".rstrip())
    return lines


def _agreement(own: pd.DataFrame, anchor: str, has_value_model: bool) -> Described:
    """Describe how far sampler and trainer agree in a run's own iterations, with values if it has a value model."""
    counts = ("unequal_old_rollout_logprobs", "first_minibatch_tokens", "unequal_values", "unequal_first_ratios")
    figures: Figures = {name: int(own[name].sum()) for name in counts}
    figures["max_abs_old_rollout"] = float(own["max_abs_old_rollout"].max(skipna=False))
    first = f"of {figures['first_minibatch_tokens']:,}"
    exact = figures["first_minibatch_tokens"] - figures["unequal_first_ratios"]
    differ = f"{figures['unequal_old_rollout_logprobs']:,} of {own['tokens'].sum():,} training log-probs differ"
    values = f"{figures['unequal_values']:,} {first} recomputed values differ from the recorded ones"
    return figures, [
        f"{differ} from the sampler's",
        f"{exact:,} {first} first-minibatch ratios (anchor {anchor}) are exactly 1",
        *([values] if has_value_model else []),
        f"largest |old - rollout| log-prob difference {figures['max_abs_old_rollout']:.3g} nats",
    ]


def _language(run_dir: Path, recorded: Manifest, rows: pd.DataFrame) -> Described:
    config, judged, measured = load_recorded_config(run_dir), is_judged(run_dir), read_accuracy(run_dir, recorded)
    card = read_card(run_dir, recorded)
    own = reader.own_rows(rows, recorded)  # a fork's origin has another configuration
    figures, agreement = _agreement(own, config.ppo.ratio_anchor, config.value.kind != "none")
    cut = cut_fraction(own)
    draws = _draws(run_dir, recorded) if are_drawn(config) else NONE
    figures |= {
        "sampled_score_first": float(own["score_mean"].iloc[0]),
        "sampled_score_last": float(rows["score_mean"].iloc[-1]),
        "reward_first": float(own["reward_mean"].iloc[0]),
        "reward_last": float(own["reward_mean"].iloc[-1]),
        "accuracy_before": float(rows["eval_accuracy"].iloc[0]),  # greedy, of held-out prompts
        "accuracy_after": float(recorded.final["eval_accuracy"]),
        "score_before": float(rows["eval_score"].iloc[0]),  # mean score of the same responses
        "score_after": float(recorded.final["eval_score"]),
        "cut_fraction": cut,  # of all responses, cut at rollout.max_response_tokens
        "is_judged": judged,  # whether responses are right or wrong, so that the accuracies mean something
        "numerical_accuracy": None if measured is None else asdict(measured),  # of the log-probs at the start
        "card": None if card is None else asdict(card),
        "draws": None
        if not draws.tokens
        else {"mean": draws.mean, "error": draws.error, "tail_probability": min(draws.tail_probabilities)},
    }
    means = sampled_means(config, own).items()
    return figures, [
        *(_change(what, figures) for what in evaluated_results(config.reward, judged)),
        "sampled responses: " + "; ".join(f"mean {words} {first:.3f} -> {last:.3f}" for words, (first, last) in means),
        *([cut_at_the_limit(cut)] if cut > MANY_CUT else []),
        f"{len(rows)} iterations, {rows['tokens'].sum():,} response tokens",
        *agreement,
        *([draws.sentence()] if draws.tokens else []),
        *not_promised(config),
        *([] if measured is None else [measured.sentence()]),
        *([] if card is None else [card.sentence()]),
    ]


def _draws(run_dir: Path, recorded: Manifest) -> Draws:
    """Measure the draws of the tokens of a run's own iterations, one iteration in memory at a time."""
    found = NONE
    for index in recorded.own_iterations:
        tokens = reader.read_tokens(run_dir, iterations=[index], columns=DRAWN, recorded=recorded)
        found += draws_of_records(index, tokens)
    return found


def draws_of_records(iteration: int, tokens: pd.DataFrame) -> Draws:
    """Measure the draws of one iteration, from the columns DRAWN of its tokens."""
    logprobs, entropies, sequences, known = (tokens[name].to_numpy() for name in DRAWN)
    return draws_of(logprobs, entropies, sequences, known, seed=iteration)


def are_drawn(config: RunConfig) -> bool:
    """Return whether the recorded tokens were drawn. Tokens that were encoded again were not."""
    return not config.mismatch.trainer.retokenize


def evaluated_results(reward: RewardConfig, judged: bool) -> list[str]:
    """Return which of `score` and `accuracy` say how good the responses to held-out prompts are.

    The score says no more than the accuracy if it is only whether the response equals the answer.
    """
    has_score = not judged or any(not isinstance(term, ExactMatch) for term in reward.terms)
    return ["score"] * has_score + ["accuracy"] * judged


def sampled_means(config: RunConfig, own: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return the first and the last mean score of the sampled responses, and mean reward if it has a KL penalty.

    The keys are words for a sentence. `own` has the rows of `iterations` that the run itself computed.
    """
    penalty = isinstance(config.kl, KLInReward) and config.kl.kl_coef > 0
    columns = {"score": "score_mean"} | ({"reward, the score minus the KL penalty,": "reward_mean"} if penalty else {})
    return {words: (float(own[name].iloc[0]), float(own[name].iloc[-1])) for words, name in columns.items()}


def _change(what: str, figures: Figures) -> str:
    before, after = figures[f"{what}_before"], figures[f"{what}_after"]
    return f"held-out {what} {change(before, after)} (greedy)"


def change(before: float, after: float) -> str:
    """Return how a number changed, in three digits: `rose from 0.246 to 0.637`, `stayed at 0.000`."""
    first, last = f"{before:.3f}", f"{after:.3f}"
    if first == last:
        return f"stayed at {last}"
    return f"{'rose' if after > before else 'fell'} from {first} to {last}"


def cut_fraction(rows: pd.DataFrame) -> float:
    """Return the fraction of the responses of some rows of `iterations` that reached the length limit."""
    return float((rows["truncated_fraction"] * rows["sequences"]).sum() / rows["sequences"].sum())


def cut_at_the_limit(fraction: float) -> str:
    """Return a phrase on the fraction of responses that reached the length limit."""
    return f"{fraction:.0%} of the responses were cut at rollout.max_response_tokens; raise it"


def is_judged(run_dir: Path) -> bool:
    """Return whether responses of a language run are right or wrong.

    They are if the prompts have answers or the task has a verifier, unless a user's function is the only reward.
    """
    reward = load_recorded_config(run_dir).reward
    first = load_head(run_dir).own_iterations[:1]
    answers = reader.read_sequences(run_dir, columns=["answer"], iterations=first, allow_incomplete=True)["answer"]
    is_known = any(isinstance(term, Verifier) for term in reward.terms) or bool((answers != "").any())
    return reward.judges and is_known


def not_promised(config: RunConfig) -> list[str]:
    """Return lines on the limits of a run whose engine promises no bits; empty for other runs."""
    engine = config.rollout.engine_without_promise
    if not engine:
        return []
    follows = "" if config.machine_dependent_setting else "; scores, rewards and updates follow from them bit for bit"
    return [f"{engine}: sampled tokens and their log-probs are recorded, not promised{follows}"]


def _control(run_dir: Path, recorded: Manifest, rows: pd.DataFrame) -> Described:
    """Describe a control run, whose tokens are environment steps. The returns are undiscounted."""
    final, (figures, agreement) = recorded.final, _agreement(rows, "rollout", has_value_model=True)
    before, after = float(rows["eval_return"].iloc[0]), float(final["eval_return"])
    figures |= {
        "episodes": int(rows["episodes"].sum()),
        "last_100_return": float(final["last_100_return"]),  # training episodes; all if there are fewer
        "eval_before": before,  # likeliest actions; NaN if no evaluation episodes are configured
        "eval_after": after,
    }
    return figures, [
        f"mean return of the last 100 training episodes {figures['last_100_return']:.2f}",
        *([] if math.isnan(after) else [f"likeliest actions: return {before:.2f} -> {after:.2f}"]),
        f"{len(rows)} iterations, {rows['tokens'].sum():,} environment steps, {figures['episodes']:,} episodes",
        *agreement,
    ]


def _dpo(run_dir: Path, recorded: Manifest, rows: pd.DataFrame) -> Described:
    """Describe a DPO run, whose tokens are the pairs of all epochs."""
    final = recorded.final
    loss = reader.read_steps(run_dir, columns=["loss"])["loss"]
    held_out = reader.read_table("margins", run_dir, iterations=[0], columns=["held_out"])["held_out"]
    has_task = "eval_accuracy" in final
    f = {
        "steps": len(loss),
        "loss_first": float(loss.iloc[0]),  # nats, mean over the pairs of a minibatch
        "loss_last": float(loss.iloc[-1]),
        "eval_pairs": int(held_out.sum()),
        "eval_pair_accuracy": float(rows["eval_pair_accuracy"].iloc[-1]),
        "accuracy_before": float(rows["eval_accuracy"].iloc[0]) if has_task else None,  # greedy
        "accuracy_after": float(final["eval_accuracy"]) if has_task else None,
        "ref_kl_per_sequence": float(final["ref_kl_per_sequence"]) if has_task else None,  # nats
    }
    epochs, pairs = len(rows), rows["pairs"].sum() // len(rows)
    lines = [
        f"held-out pairs in the right order 0.500 -> {f['eval_pair_accuracy']:.3f} ({f['eval_pairs']:,} pairs)",
        f"loss {f['loss_first']:.4f} -> {f['loss_last']:.4f} nats, {pairs:,} pairs, {epochs} epochs, "
        f"{f['steps']} steps",
    ]
    if has_task:
        lines.insert(0, f"held-out accuracy {f['accuracy_before']:.3f} -> {f['accuracy_after']:.3f} (greedy)")
        lines.append(f"KL(policy || reference) {f['ref_kl_per_sequence']:.4f} nats per response")
    return f, lines


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
