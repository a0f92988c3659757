"""Write the sentences of a run's page: whether the run learned, is on-policy, and had troubles."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.agreement import Agreement
from ppo_repro.analysis.html.markup import number, sentence, share
from ppo_repro.analysis.html.page import Statement
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.mismatch import SamplerFaults, TrainerFaults
from ppo_repro.config.run import RunConfig
from ppo_repro.records.notes import Accuracy
from ppo_repro.records.reader import own_rows
from ppo_repro.runs.summary import (
    MANY_CUT,
    are_drawn,
    change,
    cut_at_the_limit,
    cut_fraction,
    evaluated_results,
    not_promised,
    sampled_means,
)
from ppo_repro.statistics.draws import Draws


def origin(facts: Facts) -> list[Statement]:
    """Return a sentence about the origin of a fork; [] for another run."""
    origin_run = facts.manifest.origin
    if origin_run is None:
        return []
    name = Path(origin_run.run).name
    copied = f"iterations 0 to {origin_run.iteration - 1} are its origin's"
    text = f"A fork of {name}: {copied}. The curves show them, the counts begin after them."
    return [Statement("fact", text)]


def learning(facts: Facts, iterations: pd.DataFrame) -> list[Statement]:
    """Return sentences about the changes of accuracy, score and KL, or of returns."""
    config = facts.ppo
    if isinstance(config, ControlConfig):
        return _changes_of_returns(facts, config, iterations)
    return _changes_of_scores(facts, config, iterations)


def _changes_of_returns(facts: Facts, config: ControlConfig, iterations: pd.DataFrame) -> list[Statement]:
    means = iterations["episode_return_mean"].dropna()
    verdicts = []
    if iterations["eval_return"].notna().any():
        name = f"Mean return of {config.evaluation.episodes} whole episodes"
        verdicts.append(_evaluated(facts, iterations, "eval_return", name, "likeliest actions"))
    if len(means):
        ends = f"{number(float(means.iloc[0]), 4)} at first, {number(float(means.iloc[-1]), 4)} at last"
        verdicts.append(Statement("fact", f"Mean return of the training episodes that ended: {ends}."))
    return verdicts


def _changes_of_scores(facts: Facts, config: RunConfig, iterations: pd.DataFrame) -> list[Statement]:
    results = evaluated_results(config.reward, facts.is_judged)
    # the origin of a fork may have other rewards
    (_, scores), *rewards = sampled_means(config, own_rows(iterations, facts.manifest)).items()
    rewarded = "".join(f"; their mean {words} {change(*means)}" for words, means in rewards)
    kl = number(float(iterations["ref_kl_per_sequence"].iloc[-1]), 3)
    how = f"greedy, {number(config.task.num_eval_prompts)} prompts"
    return [
        *(_evaluated(facts, iterations, f"eval_{result}", f"Held-out {result}", how) for result in results),
        Statement("fact", f"Mean score of the sampled responses {change(*scores)}{rewarded}."),
        Statement("fact", f"KL(policy || reference) at last: {kl} nats per response (exact, mean over the responses)."),
    ]


def _evaluated(facts: Facts, iterations: pd.DataFrame, column: str, name: str, how: str) -> Statement:
    """Return a sentence about the first and the last evaluation of one metric."""
    rows = iterations.loc[iterations[column].notna(), ["iteration", column]]
    values = [float(value) for value in rows[column]]
    where = f"before iteration {rows['iteration'].iloc[-1]}" if len(rows) else ""
    if column in facts.manifest.final:
        values.append(float(facts.manifest.final[column]))
        where = "after the last update"
    if len(values) < 2:
        measured = f"{number(values[0], 3)} at the start" if values else "not measured"
        return Statement("fact", f"{name}: {measured}.")
    return Statement("fact", f"{name} {change(values[0], values[-1])} {where} ({how}).")


def on_policy(facts: Facts, counted: Agreement, draws: Draws) -> list[Statement]:
    """Return sentences about the agreement of sampler and trainer: log-probs, ratios, values and draws."""
    config, unit = facts.ppo, facts.content.token_unit
    unequal, tokens = counted.unequal_old_rollout_logprobs, counted.tokens
    right = f"Sampler and trainer agree on every bit of {tokens:,} {unit}."
    wrong = (
        f"{share(unequal, tokens)} of log-probs differ between sampler and trainer ({unequal:,} of {tokens:,} {unit}, "
        f"largest difference {number(counted.max_abs_old_rollout, 2)} nats)."
    )
    verdicts = [_counted(unequal, right, wrong)]
    if counted.first_minibatch_tokens:
        verdicts += _first_minibatches(config, counted, unit)
    if draws.tokens and (isinstance(config, ControlConfig) or are_drawn(config)):
        verdicts.append(_counted(int(draws.is_wrong), sentence(draws.sentence()), draws.sentence()))
    if isinstance(config, RunConfig):
        verdicts += [Statement("fact", f"{text}.") for text in not_promised(config)]
    if facts.accuracy is not None:
        verdicts.append(_distance_from_float64(config, facts.accuracy))
    return verdicts


def _first_minibatches(config: RunConfig | ControlConfig, counted: Agreement, unit: str) -> list[Statement]:
    """Return sentences about ratios and values of the first minibatches, in which the policy has not changed."""
    rows, verdicts = counted.first_minibatch_tokens, []
    if isinstance(config, ControlConfig) or config.ppo.objective.kind != "policy_gradient":
        anchor = "rollout" if isinstance(config, ControlConfig) else config.ppo.ratio_anchor
        other = counted.unequal_first_ratios
        right = f"Every ratio of the first minibatches is exactly 1 ({rows:,} {unit}, anchor {anchor})."
        wrong = f"{share(other, rows)} of first-minibatch ratios are not 1 ({other:,} of {rows:,}, anchor {anchor})."
        verdicts.append(_counted(other, right, wrong))
    if isinstance(config, ControlConfig) or config.value.kind != "none":
        other = counted.unequal_values
        right = f"Values computed again in the first minibatches agree on every bit ({rows:,} {unit})."
        wrong = f"{share(other, rows)} of values differ when computed again ({other:,} of {rows:,})."
        verdicts.append(_counted(other, right, wrong))
    return verdicts


def _distance_from_float64(config: RunConfig | ControlConfig, measured: Accuracy) -> Statement:
    distance = f"{number(measured.ratio, 2)} times as far from the model in float64 as stock {measured.stock}'s"
    whose = "trainer" if isinstance(config, RunConfig) and config.rollout.engine_without_promise else "sampler"
    text = f"The {whose}'s log-probs are {distance} ({measured.tokens:,} tokens, rms)."
    return Statement("differs" if measured.is_low else "fact", text)


def _counted(wrong: int, holds: str, differs: str) -> Statement:
    return Statement("differs", differs) if wrong else Statement("holds", holds)


def troubles(facts: Facts, iterations: pd.DataFrame, nonfinite_ratios: int, nonfinite_deltas: int) -> list[Statement]:
    """Return sentences about missing iterations, cut responses, values that are not finite, and deliberate faults."""
    verdicts = state(facts)
    if nonfinite_ratios + nonfinite_deltas:
        counted = f"{nonfinite_ratios:,} ratios, {nonfinite_deltas:,} log-prob differences"
        verdicts.append(Statement("differs", f"Not finite: {counted}. No figure includes them."))
    if isinstance(facts.config, RunConfig):
        if (cut := cut_fraction(iterations)) > MANY_CUT:
            verdicts.append(Statement("differs", f"{cut_at_the_limit(cut)}."))
        verdicts += on_purpose(facts.config)
    return verdicts or [Statement("holds", "Nothing: the run is complete, and its ratios and log-probs are finite.")]


def state(facts: Facts) -> list[Statement]:
    """Return a sentence about a run that is not complete; [] for a complete run."""
    if facts.manifest.status == "complete":
        return []
    words = {"running": "is not finished: it works still, or was killed,", "interrupted": "was interrupted"}
    text = (
        f"The run {words.get(facts.manifest.status, 'failed')} after {len(facts.iterations)} of "
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
