"""The facts about a run: name, configuration, digests and machine, and its verdicts and key numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from analysis.mismatch.parity import Parity
from analysis.report.drawing.markup import number, share
from analysis.report.figures.clipping import ClipBounds
from ppo_repro.config.objectives import AdaptiveClipObjective, ClipObjective
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.records import accuracy, reader
from ppo_repro.records.accuracy import Accuracy
from ppo_repro.records.config_file import CONFIG_NAME, ENVIRONMENT_NAME, load_recorded_config, read_note
from ppo_repro.records.manifest import Manifest, has_responses


@dataclass(frozen=True)
class Verdict:
    """One sentence; by `kind` it says that a promise holds, that something differs, or states a fact."""

    kind: Literal["holds", "differs", "fact"]
    text: str


@dataclass(frozen=True)
class RunFacts:
    """A recorded run; `name` is experiment/folder, so that no path of the machine gets into the page."""

    run_dir: Path
    name: str
    manifest: Manifest
    config: RunConfig
    config_text: str
    environment: dict[str, Any]
    accuracy: Accuracy | None  # of the log-probs at the start; None where it was not measured


def read_facts(run_dir: Path) -> RunFacts:
    """Manifest, configuration and environment of a complete language run; raises UserError on any other."""
    manifest = reader.open_manifest(run_dir)
    if not has_responses(manifest):
        raise UserError(f"{run_dir}: is a {manifest.kind} run; reports are for language runs, use ppo-repro show")
    environment = read_note(run_dir, manifest, ENVIRONMENT_NAME)
    config = load_recorded_config(run_dir)
    text = (run_dir / CONFIG_NAME).read_text(encoding="utf-8")
    name, measured = f"{config.experiment}/{run_dir.resolve().name}", accuracy.read(run_dir, manifest)
    return RunFacts(run_dir, name, manifest, config, text, environment, measured)


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


def parity_verdicts(counted: Parity, config: RunConfig) -> tuple[Verdict, ...]:
    """Whether sampler and trainer agree, in words; without a sentence on ratios or values that do not exist."""
    unequal, tokens = counted.unequal_old_rollout_logprobs, counted.tokens
    if unequal == 0:
        verdicts = [Verdict("holds", f"Sampler and trainer agree on every bit of {tokens:,} tokens.")]
    else:
        text = (
            f"{share(unequal, tokens)} of log-probs differ between sampler and trainer ({unequal:,} of {tokens:,} "
            f"tokens, largest difference {number(counted.max_abs_old_rollout, 2)} nats)."
        )
        verdicts = [Verdict("differs", text)]
    sigma = config.rollout.mismatch_sigma
    if sigma is not None:
        verdicts.insert(
            0, Verdict("fact", f"The sampler was disturbed on purpose: rollout.mismatch_sigma = {sigma:g}.")
        )
    first, rows = counted.unequal_first_ratios, counted.first_minibatch_tokens
    anchor = config.ppo.ratio_anchor
    if rows and config.ppo.objective.kind != "policy_gradient":
        text = f"Every ratio of the first minibatches is exactly 1 ({rows:,} tokens, anchor {anchor})."
        if first:
            text = f"{share(first, rows)} of first ratios are not exactly 1 ({first:,} of {rows:,}, anchor {anchor})."
        verdicts.append(Verdict("differs" if first else "holds", text))
    if rows and config.value.kind != "none":
        unequal = counted.unequal_values
        text = f"Values computed again in the first minibatches agree on every bit ({rows:,} tokens)."
        if unequal:
            text = f"{share(unequal, rows)} of values differ when computed again ({unequal:,} of {rows:,})."
        verdicts.append(Verdict("differs" if unequal else "holds", text))
    return tuple(verdicts)


def learning_verdicts(facts: RunFacts, iterations: pd.DataFrame) -> tuple[Verdict, ...]:
    """How accuracy, score and KL changed, in words."""
    before, after = float(iterations["eval_accuracy"].iloc[0]), float(facts.manifest.final["eval_accuracy"])
    verb = "rose" if after > before else "fell" if after < before else "stayed"
    first, last = (float(iterations["score_mean"].iloc[i]) for i in (0, -1))
    kl = float(iterations["ref_kl_per_sequence"].iloc[-1])
    return (
        Verdict("fact", f"Held-out accuracy {verb} from {before:.3f} to {after:.3f} (greedy)."),
        Verdict(
            "fact", f"Mean score of the sampled responses: {number(first, 3)} at first, {number(last, 3)} at last."
        ),
        Verdict(
            "fact", f"KL(policy || reference) at last: {number(kl, 3)} nats per response (exact, seq_mean_token_sum)."
        ),
    )


def accuracy_verdict(found: Accuracy | None) -> tuple[Verdict, ...]:
    """How far the log-probs at the start were from the model in float64, in words; nothing where nobody measured."""
    if found is None:
        return ()
    text = f"Exact log-probs are {number(found.ratio, 2)} times as far from the model in float64 as stock float32's"
    if found.is_low:
        return (Verdict("differs", f"{text}; {found.worst_layer} lost most."),)
    return (Verdict("fact", f"{text} ({found.tokens:,} tokens, rms)."),)


def accuracy_numbers(found: Accuracy | None) -> tuple[tuple[str, pd.DataFrame], ...]:
    """A table of the distances of log-probs from the model in float64; none where nobody measured."""
    if found is None:
        return ()
    rows = (("exact", found.exact_rms, found.exact_max), ("stock float32", found.stock_rms, found.stock_max))
    frame = pd.DataFrame(rows, columns=["numerics", "rms, nats", "largest, nats"])
    return ((f"Log-probs of {found.tokens:,} tokens at the start, distance from float64", frame),)


def nonfinite_verdict(extremes: pd.DataFrame, nonfinite_deltas: int) -> tuple[Verdict, ...]:
    """A sentence if something is not finite."""
    ratios = int(extremes["nonfinite_ratios"].sum())
    if ratios + nonfinite_deltas == 0:
        return ()
    text = f"Not finite: {ratios:,} ratios, {nonfinite_deltas:,} log-prob differences. No figure includes them."
    return (Verdict("differs", text),)


def whole_run_numbers(iterations: pd.DataFrame, parity: Parity, seconds: Mapping[str, float]) -> pd.DataFrame:
    """quantity, value, unit: counts over all iterations, and the seconds of each phase."""
    rows: list[tuple[str, object, str]] = [
        ("iterations", len(iterations), ""),
        ("responses", int(iterations["sequences"].sum()), ""),
        ("response tokens", int(iterations["tokens"].sum()), ""),
        ("optimizer steps of the policy", int(iterations["policy_steps"].sum()), ""),
        ("unequal old and rollout log-probs", parity.unequal_old_rollout_logprobs, "tokens"),
        ("largest |old - rollout|", parity.max_abs_old_rollout, "nats"),
    ]
    for phase, spent in seconds.items():
        rows.append((f"time, {phase}", round(spent, 1), "s"))
    return pd.DataFrame(rows, columns=["quantity", "value", "unit"])


def first_and_last_numbers(iterations: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """quantity, first, last, unit: recorded values of the first and of the last iteration."""
    columns = (
        ("score, mean", "score_mean", ""), ("accuracy, sampled", "accuracy", ""),
        ("reward per response", "reward_mean", ""),
        ("KL(policy || reference), exact", "ref_kl_per_sequence", "nats/response"),
        ("KL(policy || reference), exact", "ref_kl_per_token", "nats/token"),
        ("entropy", "entropy", "nats/token"), ("response length", "response_length_mean", "tokens"),
        ("cut at the length limit", "truncated_fraction", "share"),
        ("explained variance", "explained_variance", ""), ("kl_coef", "kl_coef", ""),
    )  # fmt: skip
    of_steps = (
        ("clip fraction, mean of the steps", "clip_fraction", "share"),
        ("KL(anchor || new), k3, mean of the steps", "approx_kl", "nats/token"),
        ("gradient norm, mean of the steps", "grad_norm", ""),
    )
    by_step = steps.groupby("iteration")[[column for _, column, _ in of_steps]].mean()
    rows = [
        (name, float(frame[column].iloc[0]), float(frame[column].iloc[-1]), unit)
        for frame, named in ((iterations, columns), (by_step, of_steps))
        for name, column, unit in named
    ]
    return pd.DataFrame(rows, columns=["quantity", "first", "last", "unit"])


def run_facts(facts: RunFacts) -> list[tuple[str, str]]:
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
        ("numerics", f"{facts.config.numerics.mode}, {environment.get('numerics_backend', 'not recorded')}"),
        ("code", f"ppo_repro {environment.get('ppo_repro', 'not recorded')}, {commit}{dirty}"),
        ("versions", f"Python {environment.get('python', 'not recorded')}, {versions}"),
        ("machine", f"{environment.get('platform', 'not recorded')}, {environment.get('cpu_capability', '')}"),
        ("layout", f"{environment.get('threads', '?')} threads, {environment.get('processes', '?')} processes"),
        ("run again", f"ppo-repro rerun {facts.name}"),
    ]  # fmt: skip
    return found
