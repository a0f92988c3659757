"""The facts about a run: name, configuration, digests and machine, and its verdicts in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.mismatch.parity import Parity
from analysis.report.drawing.figure import Verdict
from analysis.report.drawing.markup import number, share
from analysis.report.figures.clipping import ClipBounds
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.mismatch import SamplerFaults, TrainerFaults
from ppo_repro.config.objectives import AdaptiveClipObjective, ClipObjective
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.records import accuracy, reader, times
from ppo_repro.records.accuracy import Accuracy
from ppo_repro.records.config_file import CONFIG_NAME, ENVIRONMENT_NAME, load_config_of, read_note
from ppo_repro.records.manifest import Manifest


@dataclass(frozen=True)
class Facts:
    """A recorded run of any kind; `name` is experiment/folder, so that no path of the machine gets into the page."""

    run_dir: Path
    name: str
    manifest: Manifest
    config: RunConfig | ControlConfig
    config_text: str
    environment: dict[str, Any]

    @property
    def iterations(self) -> range:
        """The complete iterations at the time of reading; a run that works still may have more by now."""
        return range(self.manifest.num_iterations)


@dataclass(frozen=True)
class RunFacts(Facts):
    """A recorded language run."""

    config: RunConfig
    accuracy: Accuracy | None  # of the log-probs at the start; None where it was not measured


@dataclass(frozen=True)
class ControlFacts(Facts):
    """A recorded control run."""

    config: ControlConfig


def read_facts(run_dir: Path) -> RunFacts | ControlFacts:
    """Manifest, configuration and environment of a run, complete or not; UserError before its first iteration."""
    manifest = reader.open_manifest(run_dir, allow_incomplete=True)
    if not manifest.iterations:
        advice = f"go on with `ppo-repro resume {run_dir}`"
        raise UserError(f"{run_dir}: the run is {manifest.status} and has no complete iteration to report; {advice}")
    environment = read_note(run_dir, manifest, ENVIRONMENT_NAME)
    config = load_config_of(run_dir, manifest)
    text = (run_dir / CONFIG_NAME).read_text(encoding="utf-8")
    name = f"{config.experiment}/{run_dir.resolve().name}"
    if isinstance(config, ControlConfig):
        return ControlFacts(run_dir, name, manifest, config, text, environment)
    return RunFacts(run_dir, name, manifest, config, text, environment, accuracy.read(run_dir, manifest))


def state_verdict(facts: Facts) -> tuple[Verdict, ...]:
    """A sentence about a run that is not complete."""
    if facts.manifest.status == "complete":
        return ()
    words = {"running": "is not finished: it works still, or was killed,", "interrupted": "was interrupted"}
    said = words.get(facts.manifest.status, "failed")
    text = (
        f"The run {said} after {len(facts.iterations)} of {facts.config.iterations} iterations, which this page "
        "shows. `ppo-repro resume RUN` goes on."
    )
    return (Verdict("fact", text),)


def clip_bounds(config: RunConfig, iterations: pd.DataFrame) -> ClipBounds | None:
    """Where the ratio is clipped in the last iteration; None for an objective that does not clip."""
    objective = config.ppo.objective
    if isinstance(objective, ClipObjective):
        return ClipBounds(1.0 - objective.clip_range, 1.0 + objective.high, False)
    if isinstance(objective, AdaptiveClipObjective):
        ranges = iterations["clip_range"]
        last = float(ranges.iloc[-1])
        return ClipBounds(1.0 - last, 1.0 + last, bool(ranges.nunique() > 1))
    return None


@dataclass(frozen=True)
class Agreement:
    """What decides which sentences on agreement make sense for a run."""

    unit: str  # what a row of `tokens` is
    anchor: str
    has_ratios: bool
    has_values: bool


def agreement_of(config: RunConfig | ControlConfig) -> Agreement:
    """The sentences that a configuration allows."""
    if isinstance(config, ControlConfig):
        return Agreement("environment steps", "rollout", True, True)
    has_ratios = config.ppo.objective.kind != "policy_gradient"
    return Agreement("tokens", config.ppo.ratio_anchor, has_ratios, config.value.kind != "none")


def disturbance_verdict(config: RunConfig) -> tuple[Verdict, ...]:
    """A sentence for each cause of mismatch that the run was given on purpose."""
    sigma = config.rollout.mismatch_sigma
    verdicts = [*_rounded_on_purpose(config), *_faults_on_purpose(config)]
    if sigma is not None:
        verdicts.append(Verdict("fact", f"The sampler was disturbed on purpose: rollout.mismatch_sigma = {sigma:g}."))
    return tuple(verdicts)


def parity_verdicts(counted: Parity, about: Agreement) -> tuple[Verdict, ...]:
    """Whether sampler and trainer agree, in words; without a sentence on ratios or values that do not exist."""
    unequal, tokens, unit = counted.unequal_old_rollout_logprobs, counted.tokens, about.unit
    if unequal == 0:
        verdicts = [Verdict("holds", f"Sampler and trainer agree on every bit of {tokens:,} {unit}.")]
    else:
        text = (
            f"{share(unequal, tokens)} of log-probs differ between sampler and trainer ({unequal:,} of {tokens:,} "
            f"{unit}, largest difference {number(counted.max_abs_old_rollout, 2)} nats)."
        )
        verdicts = [Verdict("differs", text)]
    first, rows, anchor = counted.unequal_first_ratios, counted.first_minibatch_tokens, about.anchor
    if rows and about.has_ratios:
        text = f"Every ratio of the first minibatches is exactly 1 ({rows:,} {unit}, anchor {anchor})."
        if first:
            text = f"{share(first, rows)} of first ratios are not exactly 1 ({first:,} of {rows:,}, anchor {anchor})."
        verdicts.append(Verdict("differs" if first else "holds", text))
    if rows and about.has_values:
        unequal = counted.unequal_values
        text = f"Values computed again in the first minibatches agree on every bit ({rows:,} {unit})."
        if unequal:
            text = f"{share(unequal, rows)} of values differ when computed again ({unequal:,} of {rows:,})."
        verdicts.append(Verdict("differs" if unequal else "holds", text))
    return tuple(verdicts)


def _rounded_on_purpose(config: RunConfig) -> Iterator[Verdict]:
    """A sentence if the sampler rounds numbers to other formats."""
    stock = config.mismatch.sampler.stock
    if stock is not None:
        yield Verdict("fact", f"The sampler was torch's own forward pass on purpose: mismatch.sampler.stock = {stock}.")
    formats = {k: v for k, v in config.mismatch.sampler.precision.model_dump().items() if v != "float32"}
    if formats:
        named = ", ".join(f"{name} {value}" for name, value in formats.items())
        yield Verdict("fact", f"The sampler was rounded on purpose: mismatch.sampler.precision = {named}.")


def _faults_on_purpose(config: RunConfig) -> Iterator[Verdict]:
    """A sentence for each fault of sampler or trainer that the run was given."""
    sides = (("sampler", config.mismatch.sampler, SamplerFaults), ("trainer", config.mismatch.trainer, TrainerFaults))
    for side, section, faults in sides:
        for name, field in faults.model_fields.items():
            value = getattr(section, name)
            if value != field.default:
                said = section.model_dump(mode="json")[name]
                yield Verdict("fact", f"A fault on purpose: mismatch.{side}.{name} = {json.dumps(said)}.")


def learning_verdicts(facts: RunFacts, iterations: pd.DataFrame) -> tuple[Verdict, ...]:
    """How accuracy, score and KL changed, in words."""
    measured = [("eval_accuracy", "Held-out accuracy")]
    if any(term.kind != "exact_match" for term in facts.config.reward.terms):
        measured.insert(0, ("eval_score", "Held-out score"))
    evaluated = [_evaluated(facts, iterations, column, name) for column, name in measured]
    first, last = (float(iterations["score_mean"].iloc[i]) for i in (0, -1))
    kl = float(iterations["ref_kl_per_sequence"].iloc[-1])
    return (
        *evaluated,
        Verdict(
            "fact", f"Mean score of the sampled responses: {number(first, 3)} at first, {number(last, 3)} at last."
        ),
        Verdict(
            "fact",
            f"KL(policy || reference) at last: {number(kl, 3)} nats per response (exact; summed over the tokens of a "
            "response, mean over the responses).",
        ),
    )


def _evaluated(facts: Facts, iterations: pd.DataFrame, column: str, name: str) -> Verdict:
    """The first and the last evaluation, with the one after the last update where the run got there."""
    rows = iterations.loc[iterations[column].notna(), ["iteration", column]]
    values = [float(value) for value in rows[column]]
    where = f"before iteration {rows['iteration'].iloc[-1]}"
    if column in facts.manifest.final:
        values.append(float(facts.manifest.final[column]))
        where = "after the last update"
    if len(values) < 2:
        return Verdict("fact", f"{name}: {number(values[0], 3)} at the start." if values else f"{name}: not measured.")
    before, after = values[0], values[-1]
    verb = "rose" if after > before else "fell" if after < before else "stayed"
    return Verdict("fact", f"{name} {verb} from {before:.3f} at the start to {after:.3f} {where} (greedy).")


def control_verdicts(facts: ControlFacts, iterations: pd.DataFrame) -> tuple[Verdict, ...]:
    """How returns changed, in words."""
    means = iterations["episode_return_mean"].dropna()
    found = []
    if len(means):
        ends = f"{number(float(means.iloc[0]), 4)} at first, {number(float(means.iloc[-1]), 4)} at last"
        found.append(Verdict("fact", f"Mean return of the training episodes that ended: {ends}."))
    if iterations["eval_return"].notna().any():
        name = f"Mean return of {facts.config.evaluation.episodes} whole episodes"
        evaluated = _evaluated(facts, iterations, "eval_return", name)
        found.append(Verdict("fact", evaluated.text.replace("(greedy)", "(likeliest actions)")))
    return tuple(found)


def accuracy_verdict(found: Accuracy | None) -> tuple[Verdict, ...]:
    """How far the log-probs at the start were from the model in float64, in words; nothing where nobody measured."""
    if found is None:
        return ()
    far = f"{number(found.ratio, 2)} times as far from the model in float64 as stock float32's"
    text = f"The sampler's log-probs are {far} ({found.tokens:,} tokens, rms)."
    return (Verdict("differs" if found.is_low else "fact", text),)


def nonfinite_verdict(extremes: pd.DataFrame, nonfinite_deltas: int) -> tuple[Verdict, ...]:
    """A sentence if something is not finite."""
    ratios = int(extremes["nonfinite_ratios"].sum())
    if ratios + nonfinite_deltas == 0:
        return ()
    text = f"Not finite: {ratios:,} ratios, {nonfinite_deltas:,} log-prob differences. No figure includes them."
    return (Verdict("differs", text),)


def run_facts(facts: Facts) -> list[tuple[str, str]]:
    """(name, value) of everything that identifies the run and its machine."""
    environment, manifest = facts.environment, facts.manifest
    packages = environment.get("packages", {})
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers", "numpy") if name in packages)
    commit = environment.get("git_commit") or "no commit"
    dirty = " with changes" if environment.get("git_dirty") else ""
    found = [
        ("run", facts.name),
        ("fingerprint", manifest.fingerprint),
        ("configuration", manifest.config_digest),
        ("seed", str(facts.config.seed)),
        ("numerics", facts.config.numerics.mode),
        ("code", f"ppo_repro {environment.get('ppo_repro', 'not recorded')}, {commit}{dirty}"),
        ("versions", f"Python {environment.get('python', 'not recorded')}, {versions}"),
        ("machine", f"{environment.get('platform', 'not recorded')}, {environment.get('cpu_capability', '')}"),
        ("layout", f"{environment.get('threads', '?')} threads, {environment.get('processes', '?')} processes"),
        ("state", f"{manifest.status}, {len(facts.iterations)} of {facts.config.iterations} iterations"),
        ("began", _began(facts)),
        ("run again", f"ppo-repro rerun RUN, where RUN is the folder {facts.run_dir.resolve().name}"),
    ]  # fmt: skip
    return found


def _began(facts: Facts) -> str:
    return str(facts.environment.get(times.STARTED, "not recorded"))
