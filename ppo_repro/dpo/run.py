"""DPO as a baseline: the policy a recorded run started from, trained on that run's own responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.buffers import Prompts
from ppo_repro.clock import as_text, moment
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import build_config, dump_yaml
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import naming_learning_rates
from ppo_repro.dpo import records
from ppo_repro.dpo.pairs import pairs_from_run
from ppo_repro.errors import PromiseBroken, UserError
from ppo_repro.files import whole_folder
from ppo_repro.numerics.optimizer import AdamWSettings, Optimizer, weights_digest
from ppo_repro.numerics.sums import mean_of, run_sums
from ppo_repro.ppo.preferences import preference_accuracy
from ppo_repro.preferences.pairs import Preference, check_pairs, hold_out
from ppo_repro.preferences.training import (
    PairLogprobs,
    PreferenceStep,
    Schedule,
    dpo_steps,
    margins_of,
    pair_logprobs,
    pairs_at_once,
)
from ppo_repro.ranks import ALONE
from ppo_repro.records import reader
from ppo_repro.records.config_file import load_recorded_config
from ppo_repro.records.contents import final_folder, reference_folder
from ppo_repro.records.manifest import Manifest, note_content
from ppo_repro.records.times import STARTED
from ppo_repro.runs.environment import check_inputs, describe_environment
from ppo_repro.runs.models_kept import save_model
from ppo_repro.runs.prepare import Prepared, prepare
from ppo_repro.seeding import sample_seed
from ppo_repro.stages.evaluation import evaluate
from ppo_repro.stages.forward import score_rollout
from ppo_repro.stages.rollout import roll_out
from ppo_repro.watcher import Watcher


@dataclass(frozen=True)
class Measured:
    """The effect of a DPO training; all of it is in the fingerprint."""

    margin_accuracy_before: float  # on held-out pairs; 0.5 while policy and reference are equal: all margins are 0
    margin_accuracy_after: float
    accuracy_before: float  # greedy, on the held-out prompts of the run
    accuracy_after: float
    ref_kl_per_sequence: float  # see `sequence_kl`
    policy_digest: str


@dataclass(frozen=True)
class DPOResult(Measured):
    """What was measured, and on how much."""

    run_dir: str
    fingerprint: str
    pairs: int
    eval_pairs: int
    steps: int
    loss_first: float  # nats, mean over the pairs of a minibatch
    loss_last: float
    seconds: float


@dataclass(frozen=True)
class _Pairs:
    """Training pairs first, then held-out ones."""

    train: list[Preference]
    held_out: list[Preference]

    @property
    def all(self) -> list[Preference]:
        return [*self.train, *self.held_out]


def dpo_folder(config: DPOConfig, out: Path) -> Path:
    """OUT/<experiment>/dpo-seed<seed>-<config digest>."""
    return out / config.experiment / f"dpo-seed{config.seed}-{config.digest()}"


def _recorded(config: DPOConfig) -> tuple[Manifest, RunConfig]:
    """The run, and its configuration with the numerics and layout of this one."""
    run_dir = Path(config.run)
    recorded = reader.open_manifest(run_dir)
    of_run = load_recorded_config(run_dir).model_dump(mode="json")
    if of_run["task"].get("max_turns", 1) > 1:
        raise UserError(f"run = {run_dir}: its episodes have several turns; DPO here compares responses of one turn")
    check_inputs(recorded.inputs)
    ours = {"numerics": config.numerics.model_dump(mode="json"), "layout": config.layout.model_dump(mode="json")}
    built_in = {
        "rollout": {**of_run["rollout"], "engine": {"kind": "torch"}}
    }  # the recorded engine may not allow `ours`
    of_run.pop("mismatch", None)  # how its sampler differed from its trainer: here nothing is sampled to be trained on
    source = f"{run_dir / 'config.yaml'} with numerics and layout of DPO"
    return recorded, build_config({**of_run, **ours, **built_in}, source)


def _start(config: DPOConfig, recorded: Manifest, run_config: RunConfig, watcher: Watcher) -> Prepared:
    """Policy and reference as the run had them before its first step, made again or from its checkpoints.

    Checked against the digest in the manifest.
    """
    reference = reference_folder(Path(config.run))
    prepared = prepare(run_config, watcher.warm_start, reference if reference.is_dir() else None)
    digest = weights_digest(prepared.state.reference.named_parameters())
    expected = recorded.final["initial_policy_digest"]
    if digest != expected:
        of_run, ours = load_recorded_config(config.run).numerics, config.numerics
        if (of_run.mode, of_run.max_context) != (ours.mode, ours.max_context):
            raise UserError(
                f"run = {config.run}: keeps no reference, and its warm start was in other numerics; "
                "choose the numerics of the run, or record it with checkpoints.every > 0"
            )
        raise PromiseBroken(f"{config.run}: the starting policy has digest {digest} here and {expected} in the records")
    return prepared


def sequence_kl(run_config: RunConfig, prepared: Prepared, seed: int) -> float:
    """KL(policy || reference) per response, nats, on one sampled response to every held-out prompt.

    At every position the divergence over the whole distribution sampled from, exactly; summed over a response,
    mean over responses. An unbiased estimate of the divergence of the two distributions over responses.
    """
    problems, ids = prepared.task.problems.held_out, prepared.task.prompt_ids
    prompts = Prompts(
        keys=tuple(p.key for p in problems),
        sample_indices=(0,) * len(problems),
        seeds=tuple(sample_seed(seed, 0, p.key, 0) for p in problems),
        texts=tuple(p.prompt for p in problems),
        answers=tuple(p.answer for p in problems),
        prompt_ids=tuple(ids[p.key] for p in problems),
    )
    rollout = roll_out(run_config, prepared.task, prepared.engine, prompts, ALONE)
    forward = score_rollout(prepared.state, rollout, run_config, ALONE)
    return mean_of(run_sums(forward.ref_kl, rollout.lengths))


def _train(
    config: DPOConfig,
    prepared: Prepared,
    pairs: Sequence[Preference],
    reference: PairLogprobs,
    temperature: float,
    watcher: Watcher,
) -> list[PreferenceStep]:
    """All optimizer steps, on the live policy of `prepared`."""
    dpo, mode, policy = config.dpo, config.numerics.mode, prepared.state.policy
    adamw = AdamWSettings(dpo.learning_rate, 0.9, 0.95, 1e-8, 0.0, 1.0)
    optimizer = Optimizer(policy, adamw, mode)
    schedule = Schedule(dpo.epochs, dpo.minibatch_size, pairs_at_once(config.layout.update_micro_batch), config.seed)
    total, steps = schedule.steps(len(pairs)), []
    for step in dpo_steps(
        policy, optimizer, pairs, reference, dpo.beta, temperature, schedule, mode, config.layout.padding
    ):
        steps.append(step)
        watcher.preferences("DPO", len(steps), total, step.loss)
    return steps


def _pair_columns(pairs: _Pairs, reference: PairLogprobs, policy: PairLogprobs, margins: Tensor) -> dict[str, Any]:
    count = len(pairs.all)
    columns: dict[str, Any] = {
        "pair": np.arange(count, dtype=np.int32),
        "held_out": np.arange(count) >= len(pairs.train),
        "prompt_key": [p.prompt_key for p in pairs.all],
        "ref_chosen_logprobs": reference.chosen.numpy(),
        "ref_rejected_logprobs": reference.rejected.numpy(),
        "chosen_logprobs": policy.chosen.numpy(),
        "rejected_logprobs": policy.rejected.numpy(),
        "margins": margins.numpy(),
    }
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        columns[name] = [np.asarray(getattr(p, name), np.int32) for p in pairs.all]
    return columns


def _step_columns(steps: Sequence[PreferenceStep]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        name: [getattr(s, name) for s in steps] for name in (c.name for c in records.STEPS.columns)
    }
    for name in ("epoch", "minibatch", "pairs"):
        columns[name] = np.asarray(columns[name], np.int32)
    return columns


def _measure(
    config: DPOConfig, run_config: RunConfig, prepared: Prepared, pairs: _Pairs, watcher: Watcher
) -> tuple[Measured, list[PreferenceStep], dict[str, Any]]:
    """Train, with every measurement before and after; also the columns of the pairs."""
    policy, mode, temperature = prepared.state.policy, config.numerics.mode, run_config.rollout.temperature
    is_held = torch.arange(len(pairs.all)) >= len(pairs.train)

    def logprobs(model: PreTrainedModel) -> PairLogprobs:
        return pair_logprobs(model, pairs.all, temperature, mode, config.layout)

    reference = logprobs(prepared.state.reference)
    accuracy_before = evaluate(run_config, prepared.task, prepared.engine, ALONE).accuracy
    margins_before = margins_of(logprobs(policy), reference, config.dpo.beta)
    of_train = reference.of(range(len(pairs.train)))
    steps = _train(config, prepared, pairs.train, of_train, temperature, watcher)
    trained = logprobs(policy)
    margins = margins_of(trained, reference, config.dpo.beta)
    measured = Measured(
        margin_accuracy_before=preference_accuracy(margins_before[is_held]),
        margin_accuracy_after=preference_accuracy(margins[is_held]),
        accuracy_before=accuracy_before,
        accuracy_after=evaluate(run_config, prepared.task, prepared.engine, ALONE).accuracy,
        ref_kl_per_sequence=sequence_kl(run_config, prepared, config.seed),
        policy_digest=weights_digest(policy.named_parameters()),
    )
    return measured, steps, _pair_columns(pairs, reference, trained, margins)


def train_dpo(config: DPOConfig, out: Path, watcher: Watcher) -> DPOResult:
    """Train by DPO and record it; the folder appears whole at the end or not at all.

    Log-probs are those of the whole distribution at the run's temperature; the reference's are computed once.
    UserError where the run is damaged, incomplete or has no pairs, or the folder exists; PromiseBroken where
    the policy that the run started from is not the recorded one.
    """
    began, started = moment(), time.perf_counter()
    folder = dpo_folder(config, out)
    if folder.exists():
        raise UserError(f"{folder}: exists already; choose another --out")
    recorded, run_config = _recorded(config)
    pairs = _Pairs(*hold_out(pairs_from_run(Path(config.run)), config.num_eval_prompts, config.seed))
    with naming_learning_rates(config):
        prepared = _start(config, recorded, run_config, watcher)
        check_pairs(pairs.all, prepared.state.policy.config.vocab_size, config.numerics.max_context)
        measured, steps, pair_columns = _measure(config, run_config, prepared, pairs, watcher)
    when = {STARTED: as_text(began), records.ENDED: as_text(moment())}
    environment = note_content({**describe_environment(run_config, ALONE.size), **when})
    columns = {"dpo_pairs": pair_columns, "dpo_steps": _step_columns(steps)}
    with whole_folder(folder) as temporary:
        (temporary / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        (temporary / "environment.json").write_bytes(environment)
        save_model(prepared.state.policy, prepared.task.tokenizer, final_folder(temporary))
        made = records.write(temporary, config.digest(), recorded.fingerprint, columns, asdict(measured))
    return DPOResult(
        **asdict(measured),
        run_dir=str(folder),
        fingerprint=made.fingerprint,
        pairs=len(pairs.train),
        eval_pairs=len(pairs.held_out),
        steps=len(steps),
        loss_first=steps[0].loss,
        loss_last=steps[-1].loss,
        seconds=time.perf_counter() - started,
    )


def lines(result: DPOResult) -> list[str]:
    """The result in words, one sentence per line."""
    r = result
    return [
        f"held-out accuracy {r.accuracy_before:.3f} -> {r.accuracy_after:.3f} (greedy)",
        f"held-out pairs in the right order {r.margin_accuracy_before:.3f} -> {r.margin_accuracy_after:.3f} "
        f"({r.eval_pairs:,} pairs; margins of 0 count one half)",
        f"loss {r.loss_first:.4f} -> {r.loss_last:.4f} nats, {r.pairs:,} pairs, {r.steps} steps",
        f"KL(policy || reference) {r.ref_kl_per_sequence:.4f} nats per response",
        f"{r.seconds:.1f} s",
        f"fingerprint {r.fingerprint}",
        f"records     {r.run_dir}",
        f"policy      {final_folder(Path(r.run_dir))}",
    ]
