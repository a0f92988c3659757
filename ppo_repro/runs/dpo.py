"""Execute DPO runs: train a policy on preference pairs. An iteration is an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_repro.base.clock import OTHER, Clock, moment
from ppo_repro.base.ranks import Ranks
from ppo_repro.base.watcher import Watcher
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.kinds import DPO
from ppo_repro.models.folders import save_model, try_to_save
from ppo_repro.models.load import load_folder
from ppo_repro.models.networks import make_policy
from ppo_repro.numerics import library
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.sums import mean_of
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.ppo.preferences import dpo_margins, preference_accuracy
from ppo_repro.preferences.preference_pairs import Preference, check_pairs, hold_out, pairs_of_file
from ppo_repro.preferences.training import PairScorer, PairTraining, PreferenceStep
from ppo_repro.records import schema
from ppo_repro.records.arrow import to_arrow
from ppo_repro.records.columns import Columns, pair_columns, rows_of, tables_at
from ppo_repro.records.folder import FINAL
from ppo_repro.records.manifest import FinalResults
from ppo_repro.runs.dpo_from_run import RecordedRun, pairs_of_run, sequence_kl, start_of_run
from ppo_repro.runs.kept_checkpoints import listed, parameter_bytes
from ppo_repro.runs.kind import Execution, Files, RunKind, Tables
from ppo_repro.runs.prepare import usable_device
from ppo_repro.runs.starting_point import Start
from ppo_repro.stages.evaluation import evaluate
from ppo_repro.tasks.templates import encoder, end_token_warning

ADAM_BETA2 = 0.95  # PPO's default, `ppo.adam_beta2`


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch."""

    index: int
    eval_accuracy: float | None  # before the first epoch only; None if there is no run with a task
    steps: tuple[PreferenceStep, ...]
    logprobs: Tensor  # [2, P] float64 of all pairs, after the epoch
    margins: Tensor  # [P] float64, after the epoch
    seconds: dict[str, float]  # wall time by phase: evaluation, update, forward, other


@dataclass(frozen=True)
class DPOExecution(Execution[Epoch]):
    """A prepared DPO run."""

    config: DPOConfig
    scorer: PairScorer  # scores pairs by the policy
    tokenizer: PreTrainedTokenizerBase
    pairs: list[Preference]  # training pairs, then held-out ones
    trained: int  # number of training pairs
    run: RecordedRun | None  # for the evaluation of responses; None without a run
    optimizer: Optimizer
    reference: Tensor  # [2, P] float64, log-probs of all pairs, computed once
    initial_digest: str
    watcher: Watcher
    ranks: Ranks
    checkpoints = None

    def iterations(self) -> Iterator[Epoch]:
        """Train the policy in place, and yield after each epoch.

        Log-probs are of the distribution without top-k and top-p.
        """
        config, dpo, scorer = self.config, self.config.dpo, self.scorer
        training = PairTraining(
            scorer.policy,
            self.optimizer,
            scorer.dpo_losses_of(self.pairs, self.reference, dpo.beta, self.optimizer),
            count=self.trained,
            settings=dpo,
            micro_batch=config.layout.update_micro_batch,
            seed=config.seed,
            ranks=self.ranks,
            progress=partial(self.watcher.step, "DPO"),
        )
        for epoch in range(dpo.epochs):
            clock = Clock()
            accuracy = self._accuracy() if epoch == 0 else None
            clock.lap("evaluation")
            steps = training.epoch(epoch)
            clock.lap("update")
            self.ranks.require_same("weights after an epoch", steps[-1].digest)
            logprobs = scorer.logprobs(self.pairs, self.ranks)
            clock.lap("forward")
            margins = dpo_margins(logprobs[0], logprobs[1], self.reference[0], self.reference[1], dpo.beta)
            clock.lap(OTHER)
            yield Epoch(epoch, accuracy, tuple(steps), logprobs, margins, clock.seconds)

    def preparation_tables(self) -> Tables:
        columns = {
            **pair_columns(self.pairs, self.trained, self.tokenizer),
            "ref_chosen_logprobs": self.reference[0].numpy(),
            "ref_rejected_logprobs": self.reference[1].numpy(),
        }
        return {"pairs": to_arrow(schema.DPO_PAIRS, columns)}

    def tables(self, item: Epoch) -> Tables:
        steps, count, held_out = item.steps, len(item.margins), item.margins[self.trained :]
        columns: dict[str, Columns] = {
            "margins": {
                "pair": range(count),
                "held_out": np.arange(count) >= self.trained,
                "chosen_logprobs": item.logprobs[0].numpy(),
                "rejected_logprobs": item.logprobs[1].numpy(),
                "margins": item.margins.numpy(),
            },
            "steps": rows_of(schema.DPO_STEPS, "step", steps),
            "iterations": {
                "pairs": [self.trained],
                "loss": [mean_of(torch.tensor([loss for step in steps for loss in step.losses], dtype=torch.float64))],
                "margin": [mean_of(item.margins[: self.trained])],
                "eval_margin": [mean_of(held_out)],
                "eval_pair_accuracy": [preference_accuracy(held_out)],
                "eval_accuracy": [item.eval_accuracy],
                **{f"seconds_{phase}": [item.seconds[phase]] for phase in ("evaluation", "forward", "update")},
                "ended_at": [moment()],
            },
        }
        return tables_at(item.index, schema.DPO_TABLES, columns)

    def progress(self, item: Epoch) -> str:
        in_order = preference_accuracy(item.margins[self.trained :])
        return f"loss {item.steps[-1].loss:.4f}  held-out pairs in order {in_order:.3f}"

    def ending(self, clock: Clock) -> tuple[FinalResults, Tables]:
        results: FinalResults = {"initial_policy_digest": self.initial_digest}
        if self.run is not None:
            accuracy = self._accuracy()
            assert accuracy is not None
            kl = sequence_kl(self.run, self.config.seed, self.ranks)
            results |= {"eval_accuracy": accuracy, "ref_kl_per_sequence": kl}
        clock.lap("evaluation")
        results["policy_digest"] = weights_digest(self.scorer.policy.named_parameters())
        clock.lap("digests")
        return results, {}

    def bytes_to_keep(self, run_dir: Path) -> int:
        return parameter_bytes(self.scorer.policy)

    def keep_models(self, run_dir: Path, link: str) -> Files:
        save_model(self.scorer.policy, self.tokenizer, run_dir / FINAL)
        return listed(run_dir, run_dir / FINAL)

    def _accuracy(self) -> float | None:
        if self.run is None:
            return None
        prepared = self.run.prepared
        return evaluate(self.run.config, prepared.task, prepared.sampler, self.ranks).accuracy


@dataclass(frozen=True)
class DPOKind(RunKind[DPOConfig, Epoch]):
    """DPO runs, which have no checkpoints: a resumed run is computed again from its beginning."""

    name = DPO
    changeable = ("layout",)

    @contextmanager
    def open(self, config: DPOConfig, run_dir: Path | None, start: Start | None = None) -> Iterator[DPOExecution]:
        mode, max_context = config.numerics.mode, config.numerics.max_context
        library.use_threads(config.layout.threads, mode == "native")
        device = usable_device(config.layout.device, mode, self.ranks)
        run = None if config.run is None else start_of_run(config, Path(config.run), self.watcher, self.ranks)
        models = _models_of_folder(config, device) if run is None else _models_of_run(run)
        train, held_out = hold_out(self._pairs(config, models.tokenizer), config.num_eval_prompts, config.seed)
        pairs = [*train, *held_out]
        check_pairs(pairs, models.policy.config.vocab_size, max_context)
        scorer, of_reference = (
            PairScorer(model, models.temperature, mode, config.layout) for model in (models.policy, models.reference)
        )
        settings = AdamWSettings(learning_rate=config.dpo.learning_rate, beta2=ADAM_BETA2)
        yield DPOExecution(
            config=config,
            scorer=scorer,
            tokenizer=models.tokenizer,
            pairs=pairs,
            trained=len(train),
            run=run,
            reference=of_reference.logprobs(pairs, self.ranks),
            initial_digest=weights_digest(models.policy.named_parameters()),
            optimizer=Optimizer(models.policy, settings, mode, self.ranks),
            watcher=self.watcher,
            ranks=self.ranks,
        )

    def _pairs(self, config: DPOConfig, tokenizer: PreTrainedTokenizerBase) -> list[Preference]:
        """Return the pairs of the configured file or run; warn if prompts end with an end token."""
        if config.pairs is None:
            return pairs_of_run(Path(str(config.run)))
        encode = encoder(tokenizer, config)
        pairs = pairs_of_file(Path(config.pairs), "pairs", tokenizer, encode, config.chat_template)
        ends, prompts = frozenset({tokenizer.eos_token_id}), [pair.prompt_ids for pair in pairs]
        if ended := end_token_warning(tokenizer, prompts, ends, config.chat_template):
            self.watcher.warning(ended)
        return pairs


@dataclass(frozen=True)
class _Models:
    """The models with which a DPO run begins."""

    policy: PreTrainedModel
    reference: PreTrainedModel  # frozen
    tokenizer: PreTrainedTokenizerBase
    temperature: float  # at which the policy is meant to sample


def _models_of_folder(config: DPOConfig, device: torch.device) -> _Models:
    assert config.model is not None
    source, tokenizer = load_folder(Path(config.model.path))
    try_to_save(source, tokenizer, f"model.path = {config.model.path}")
    nn.Module.to(source, device)
    numerics = config.numerics
    policy, frozen = (make_policy(source, numerics.mode, numerics.max_context, numerics.precision) for _ in range(2))
    return _Models(policy, frozen.requires_grad_(False), tokenizer, 1.0)


def _models_of_run(run: RecordedRun) -> _Models:
    state = run.prepared.state
    return _Models(state.policy, state.reference, run.prepared.task.tokenizer, run.config.rollout.temperature)
