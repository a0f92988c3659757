"""Execute language runs: PPO on a language model, in one or several processes, with checkpoints."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from ppo_repro.base.clock import Clock
from ppo_repro.base.files import whole_folder, write_sums
from ppo_repro.base.ranks import Ranks
from ppo_repro.base.watcher import Watcher
from ppo_repro.buffers import Iteration
from ppo_repro.config.kinds import LANGUAGE
from ppo_repro.config.model import ModelFolder
from ppo_repro.config.run import RunConfig
from ppo_repro.loop import ppo_iterations
from ppo_repro.models.folders import named_weights, save_adapter, save_model, save_value_model, write_model
from ppo_repro.numerics.devices import Card, kernels_of
from ppo_repro.numerics.sums import mean_of
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.records.columns import arrow_tables, evaluation_table, preparation_tables
from ppo_repro.records.folder import ACCURACY_NAME, CARD_NAME, FINAL, VALUE_MODEL
from ppo_repro.records.manifest import FinalResults
from ppo_repro.records.notes import Accuracy, OnCard
from ppo_repro.runs import checkpoint
from ppo_repro.runs.accuracy import policy_accuracy
from ppo_repro.runs.kept_checkpoints import Checkpoints, listed, parameter_bytes
from ppo_repro.runs.kind import Execution, Files, RunKind, Tables
from ppo_repro.runs.notices import with_notices
from ppo_repro.runs.prepare import Prepared, prepare
from ppo_repro.runs.starting_point import Start
from ppo_repro.sampler import Sampler
from ppo_repro.sampling.faults.sampler import with_faults
from ppo_repro.sampling.recorded_samples import Recorded
from ppo_repro.sampling.run_sampler import SamplerContext, own_process, run_sampler
from ppo_repro.stages.coefficients import last_kl
from ppo_repro.stages.evaluation import evaluate

PROMPTS = "prompts and answers"  # what a fork may change


@dataclass(frozen=True)
class LanguageExecution(Execution[Iteration]):
    """A prepared language run."""

    config: RunConfig
    prepared: Prepared
    sampler: Sampler
    ranks: Ranks
    checkpoints: Checkpoints
    watcher: Watcher
    accuracy: Accuracy | None  # None if it was not measured, for example in a resumed run

    def notes(self) -> Mapping[str, Mapping[str, Any]]:
        return {} if self.accuracy is None else {ACCURACY_NAME: asdict(self.accuracy)}

    def closing_notes(self) -> Mapping[str, Mapping[str, Any]]:
        state = self.prepared.state
        card = kernels_of(state.policy.device)
        if self.config.is_native or not isinstance(card, Card):
            return {}
        return {CARD_NAME: asdict(OnCard(card.name, card.capability, card.driver, state.cross_checked))}

    def iterations(self) -> Iterator[Iteration]:
        config, task, state = self.config, self.prepared.task, self.prepared.state
        end_ids = self.prepared.sampler.stop_ids
        sampler = with_faults(config.mismatch, self.sampler, state, task.tokenizer, end_ids, self.ranks)
        items = ppo_iterations(config, task, state, sampler, self.ranks)
        yield from with_notices(items, config, task.tokenizer, state.policy.config.vocab_size, self.watcher)

    def preparation_tables(self) -> Tables:
        prepared, level = self.prepared, self.config.records.level
        return preparation_tables(prepared.warm_start, prepared.reward_training, prepared.task.tokenizer, level)

    def tables(self, item: Iteration) -> Tables:
        return arrow_tables(item, self.config)

    def progress(self, item: Iteration) -> str:
        score, accuracy = mean_of(item.rewards.scores), mean_of(item.rewards.is_correct)
        task = self.prepared.task
        has_answers = task.problems.has_answers or task.judge.verifier is not None
        right = f"accuracy {accuracy:.3f}  " if has_answers and self.config.reward.judges else ""
        return f"score {score:.3f}  {right}approx_kl {last_kl(item.updates):.4f}"

    def ending(self, clock: Clock) -> tuple[FinalResults, Tables]:
        evaluation = evaluate(self.config, self.prepared.task, self.sampler, self.ranks)
        clock.lap("evaluation")
        state, training = self.prepared.state, self.prepared.reward_training
        judged = {} if training is None else {"reward_model_pair_accuracy": training.accuracy_after}
        digests = {
            # the reference has the policy's weights before the first step, and before a deliberate flip of a bit
            "initial_policy_digest": weights_digest(state.reference.named_parameters()),
            "policy_digest": weights_digest(state.policy.named_parameters()),
            "value_digest": weights_digest(state.own_value_module.named_parameters()),
        }
        clock.lap("digests")
        scores = {"eval_accuracy": evaluation.accuracy, "eval_score": evaluation.score}
        results: FinalResults = {**judged, **scores, **digests}
        return results, evaluation_table(evaluation, state.iteration, self.config.records.level)

    def bytes_to_keep(self, run_dir: Path) -> int:
        state, lora = self.prepared.state, self.prepared.lora
        models = [state.policy, state.own_value_module]
        if lora is not None and not isinstance(self.config.model, ModelFolder):
            models.append(state.reference)  # the adapters need it as their base
        if self.prepared.reward_training is not None and self.prepared.task.reward_model is not None:
            models.append(self.prepared.task.reward_model)
        return sum(map(parameter_bytes, models)) + self.checkpoints.bytes_to_keep(run_dir)

    def put_policy(self, folder: Path) -> None:
        write_model(self.prepared.state.policy, folder)
        self.prepared.task.tokenizer.save_pretrained(folder)

    def keep_models(self, run_dir: Path, link: str) -> Files:
        """Save the trained policy and value model, the adapter in peft's format, a reward model, the state."""
        prepared, state, folder = self.prepared, self.prepared.state, run_dir / FINAL
        made = [folder]
        save_model(state.policy, prepared.task.tokenizer, folder)
        if prepared.lora is not None:
            base = folder.with_name("base")
            if isinstance(self.config.model, ModelFolder):
                base = Path(self.config.model.path)
            else:
                save_model(state.reference, prepared.task.tokenizer, base)
                made.append(base)
            made.append(folder.with_name("adapter"))
            with whole_folder(made[-1]) as temporary:
                save_adapter(prepared.lora, temporary, str(base))
                write_sums(temporary)
        if prepared.reward_training is not None and prepared.task.reward_model is not None:
            made.append(folder.with_name("reward_model"))
            save_model(prepared.task.reward_model, prepared.task.tokenizer, made[-1])
        if state.value_model is not None:
            made.append(run_dir / VALUE_MODEL)
            config = state.value_model.trunk.config if state.value_head is None else None
            save_value_model(named_weights(state.own_value_module), config, made[-1])
        return {**listed(run_dir, *made), **self.checkpoints.save_final(run_dir, link)}


@dataclass(frozen=True)
class LanguageKind(RunKind[RunConfig, Iteration]):
    """Language runs, as this process, one of `ranks`, computes them."""

    recorded: Recorded | None = None  # the run itself, if it is resumed or repeated
    name = LANGUAGE
    changeable = ("layout", "rollout.engine", "records")
    resumed_alone = ("checkpoints",)

    def over(self, run_dir: Path, iterations: int) -> Self:
        return replace(self, recorded=Recorded(run_dir, iterations))

    @contextmanager
    def open(self, config: RunConfig, run_dir: Path | None, start: Start | None = None) -> Iterator[LanguageExecution]:
        """Open an execution. Raises PromiseBroken if a rank begins with other weights than the first one."""
        with ExitStack() as stack:
            context = SamplerContext(config, run_dir, self.recorded, self.watcher, self.ranks)
            # started first, so that its mistakes are reported before the minutes of a warm start
            process = stack.enter_context(own_process(context))
            reference = None if start is None else start.reference
            prepared = prepare(config, self.watcher, reference, share=True, ranks=self.ranks)
            state, tokenizer, digests = prepared.state, prepared.task.tokenizer, _task_digests(prepared)
            self._check_prepared(config, prepared)
            accuracy = None
            if run_dir is not None and start is None:
                accuracy = self._measured(config, prepared)
            if start is not None:
                checkpoint.restore(start.take(), state, digests)
            stack.enter_context(_quick_collections())
            sampler = stack.enter_context(run_sampler(context, process, prepared.sampler, state, tokenizer))
            checkpoints = Checkpoints(config, state, tokenizer, digests, is_adapted=prepared.lora is not None)
            yield LanguageExecution(config, prepared, sampler, self.ranks, checkpoints, self.watcher, accuracy)

    def _check_prepared(self, config: RunConfig, prepared: Prepared) -> None:
        """Raise PromiseBroken if the ranks have other weights; warn if an iteration asks a prompt twice."""
        asked, prompts = config.rollout.prompts_per_iteration, len(prepared.task.problems.train)
        if asked > prompts:
            again = f"there are {prompts} prompts to train on; an iteration asks some of them again"
            self.watcher.warning(f"rollout.prompts_per_iteration = {asked}: {again}")
        networks = prepared.state.policy, prepared.state.own_value_module
        digests = [weights_digest(module.named_parameters()) for module in networks]
        self.ranks.require_same("initial weights", digests)

    def _measured(self, config: RunConfig, prepared: Prepared) -> Accuracy | None:
        """Measure the accuracy of the policy before its first step, and warn if it is low."""
        accuracy = policy_accuracy(config.numerics, prepared.task.prompt_ids, prepared.state.policy)
        prepared.state.free_update_memory()
        if accuracy is not None and accuracy.is_low:
            self.watcher.warning(accuracy.sentence())
        return accuracy


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Hide the objects that exist now from the garbage collector, so that `gc.collect` is quick inside the block.

    safetensors and json leave cycles of objects behind with every checkpoint. By itself, the collector looks at all
    objects only when there are a quarter more of them, or 70,000, so memory would grow over thousands of iterations.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _task_digests(prepared: Prepared) -> dict[str, str]:
    """Return the SHA-256, by name, of the inputs that must be the same when the run continues."""
    task = prepared.task
    splits = task.problems.train, task.problems.held_out
    return {
        PROMPTS: _digest([[(p.key, p.prompt, p.answer, task.prompt_ids[p.key]) for p in some] for some in splits]),
        "held-out prompts": _digest([(p.key, p.prompt, p.messages, p.answer) for p in task.problems.held_out]),
        "end tokens": _digest(sorted(prepared.sampler.stop_ids)),
        "tokens of the tokenizer": _digest(sorted(task.tokenizer.get_vocab().items())),
    }


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
