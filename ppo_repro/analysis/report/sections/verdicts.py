"""Write the sentences of a run's page: whether the run learned, and had troubles."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ppo_repro.analysis.html.markup import number, sentence
from ppo_repro.analysis.html.page import Statement
from ppo_repro.analysis.report.data.page_numbers import Counts
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.config.mismatch import SamplerFaults, TrainerFaults
from ppo_repro.config.run import RunConfig
from ppo_repro.runs.results import Change, LanguageResults, PPOResults
from ppo_repro.runs.summary import cut_warning, evaluations, sampled_sentence


def origin(facts: Facts) -> list[Statement]:
    """Return a sentence about the origin of a fork; [] for another run."""
    origin_run = facts.manifest.origin
    if origin_run is None:
        return []
    copied = f"A fork of {Path(origin_run.run).name}: iterations 0 to {origin_run.iteration - 1} are its origin's."
    return [Statement("fact", f"{copied} The curves show them, the counts begin after them.")]


def learning(facts: Facts, results: PPOResults) -> list[Statement]:
    """Return sentences about the changes of accuracy, score and KL, or of returns."""
    sentences = []
    if isinstance(results, LanguageResults):
        for name, change in evaluations(results).items():
            how = f"greedy, {number(results.config.task.num_eval_prompts)} prompts"
            sentences.append(_evaluated(facts, f"eval_{name}", f"Held-out {name}", change, how))
        sentences.append(sentence(sampled_sentence(results)))
        kl = number(float(facts.iterations["ref_kl_per_sequence"].iloc[-1]), 3)
        sentences.append(f"KL(policy || reference) at last: {kl} nats per response (exact, mean over the responses).")
    else:
        returns = Change(results.figures.eval_before, results.figures.eval_after)
        if not math.isnan(returns.first):
            name = f"Mean return of {results.config.evaluation.episodes} whole episodes"
            sentences.append(_evaluated(facts, "eval_return", name, returns, "likeliest actions"))
        means = facts.iterations["episode_return_mean"].dropna()
        if len(means):
            ends = f"{number(float(means.iloc[0]), 4)} at first, {number(float(means.iloc[-1]), 4)} at last"
            sentences.append(f"Mean return of the training episodes that ended: {ends}.")
    return [Statement("fact", text) for text in sentences]


def _evaluated(facts: Facts, column: str, name: str, change: Change, how: str) -> str:
    """Return a sentence about the first and the last evaluation of one metric."""
    if math.isnan(change.first):
        return f"{name}: not measured."
    measured = facts.iterations.loc[facts.iterations[column].notna(), "iteration"]
    is_final = column in facts.manifest.final
    if not is_final and len(measured) < 2:
        return f"{name}: {number(change.first, 3)} at the start."
    moment = "after the last update" if is_final else f"before iteration {measured.iloc[-1]}"
    return f"{name} {change} {moment} ({how})."


def troubles(facts: Facts, results: PPOResults, counts: Counts) -> list[Statement]:
    """Return sentences about missing iterations, cut responses, values that are not finite, and deliberate faults."""
    verdicts = state(facts, "The run")
    if counts.nonfinite_ratios + counts.nonfinite_deltas:
        counted = f"{counts.nonfinite_ratios:,} ratios, {counts.nonfinite_deltas:,} log-prob differences"
        verdicts.append(Statement("differs", f"Not finite: {counted}. No figure includes them."))
    if isinstance(results, LanguageResults):
        if (cut := cut_warning(results.figures.cut_fraction)) is not None:
            verdicts.append(Statement("differs", sentence(cut)))
        verdicts += on_purpose(results.config)
    return verdicts or [Statement("holds", "Nothing: the run is complete, and its ratios and log-probs are finite.")]


def state(facts: Facts, name: str) -> list[Statement]:
    """Return a sentence about a run that is not complete, which it calls `name`; [] for a complete run."""
    if facts.manifest.status == "complete":
        return []
    words = {"running": "is not finished: it works still, or was killed,", "interrupted": "was interrupted"}
    text = (
        f"{name} {words.get(facts.manifest.status, 'failed')} after {len(facts.iterations)} of "
        f"{facts.config.iterations} iterations, which this page shows. `ppo-repro resume RUN` goes on."
    )
    return [Statement("differs", text)]


def on_purpose(config: RunConfig) -> list[Statement]:
    """Return a sentence for each deliberate cause of mismatch in the configuration."""
    sampler, trainer = config.mismatch.sampler, config.mismatch.trainer
    sentences = []
    if sampler.stock is not None:
        chosen = f"mismatch.sampler.stock = {sampler.stock}"
        sentences.append(f"The sampler was torch's own forward pass on purpose: {chosen}.")
    formats = [f"{name} {value}" for name, value in sampler.precision.model_dump().items() if value != "float32"]
    if formats:
        sentences.append(f"The sampler was rounded on purpose: mismatch.sampler.precision = {', '.join(formats)}.")
    for side, section, faults in (("sampler", sampler, SamplerFaults), ("trainer", trainer, TrainerFaults)):
        for name, field in faults.model_fields.items():
            if name not in ("stock", "precision") and getattr(section, name) != field.default:
                value = json.dumps(section.model_dump(mode="json")[name])
                sentences.append(f"A fault on purpose: mismatch.{side}.{name} = {value}.")
    if config.mismatch.flip is not None:
        sentences.append(f"A fault on purpose: mismatch.flip = {config.mismatch.flip}.")
    if config.rollout.mismatch_sigma is not None:
        sigma = f"rollout.mismatch_sigma = {config.rollout.mismatch_sigma:g}"
        sentences.append(f"The sampler was disturbed on purpose: {sigma}.")
    return [Statement("fact", text) for text in sentences]
