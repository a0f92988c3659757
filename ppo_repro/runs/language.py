"""Language runs: PPO on a language model, on one or several processes, with checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from ppo_repro.accuracy import policy_accuracy
from ppo_repro.buffers import Iteration, Rollout
from ppo_repro.clock import Clock
from ppo_repro.config.engine import SGLangServers
from ppo_repro.config.files import LANGUAGE, Kind
from ppo_repro.config.run import RunConfig
from ppo_repro.faults.sampler import disturbed
from ppo_repro.faults.trainer import received
from ppo_repro.loop import ppo_iterations
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.numerics.sums import mean_of
from ppo_repro.ranks import ALONE, Ranks
from ppo_repro.records.columns import evaluation_table, iteration_tables, preparation_tables
from ppo_repro.records.folder import ACCURACY_NAME, Accuracy
from ppo_repro.rollout.engine import Engine
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.runs.kind import Final, Start, Store, Tables
from ppo_repro.runs.models_kept import ModelStore, go_on_from, quick_collections, task_digest
from ppo_repro.runs.prepare import Prepared, prepare
from ppo_repro.runs.summary import MANY_CUT, cut_at_the_limit
from ppo_repro.stages.coefficients import last_kl
from ppo_repro.stages.evaluation import evaluate
from ppo_repro.watcher import Watcher


@dataclass(frozen=True)
class LanguageExecution:
    """A language run that is prepared."""

    config: RunConfig
    prepared: Prepared
    engine: Engine
    ranks: Ranks
    store: Store
    watcher: Watcher
    accuracy: Accuracy | None  # None where it is not measured, as in a resumed run

    @property
    def notes(self) -> Mapping[str, Mapping[str, Any]]:
        return {} if self.accuracy is None else {ACCURACY_NAME: asdict(self.accuracy)}

    def iterations(self) -> Iterator[Iteration]:
        config, task, state = self.config, self.prepared.task, self.prepared.state
        engine = disturbed(config, self.engine, state, task.tokenizer)

        def receive(rollout: Rollout) -> Rollout:
            return received(config.mismatch.trainer, rollout, task.tokenizer)

        was_said = False
        for item in ppo_iterations(config, task, state, engine, self.ranks, receive):
            cut = item.rollout.finish_reasons.count("length") / len(item.rollout.finish_reasons)
            if cut > MANY_CUT and not was_said:
                self.watcher.warning(f"iteration {item.index}: {cut_at_the_limit(cut)}")
                was_said = True
            yield item

    @property
    def _records_side_tables(self) -> bool:
        return self.config.records.level != "lean"

    def preparation_tables(self) -> Tables:
        if not self._records_side_tables:
            return {}
        prepared = self.prepared
        return preparation_tables(prepared.warm_start, prepared.reward_training, prepared.task.tokenizer)

    def tables(self, item: Iteration) -> Tables:
        return iteration_tables(item, self.config)

    def progress(self, item: Iteration) -> str:
        score, accuracy = mean_of(item.rewards.scores), mean_of(item.rewards.is_correct)
        task = self.prepared.task
        has_answers = task.problems.has_answers or task.judge.verifier is not None
        right = f"accuracy {accuracy:.3f}  " if has_answers else ""
        return f"score {score:.3f}  {right}KL {last_kl(item.updates):.4f}"

    def ending(self, clock: Clock) -> tuple[Final, Tables]:
        evaluation = evaluate(self.config, self.prepared.task, self.engine, self.ranks)
        clock.lap("evaluation")
        state, training = self.prepared.state, self.prepared.reward_training
        judged = {} if training is None else {"reward_model_pair_accuracy": training.accuracy_after}
        digests = {
            # the reference is what the policy was before the first step
            "initial_policy_digest": weights_digest(state.reference.named_parameters()),
            "policy_digest": weights_digest(state.policy.named_parameters()),
            "value_digest": weights_digest(state.own_value_module.named_parameters()),
        }
        clock.lap("digests")
        results: Final = {**judged, "eval_accuracy": evaluation.accuracy, "eval_score": evaluation.score, **digests}
        tables = evaluation_table(evaluation, state.iteration) if self._records_side_tables else {}
        return results, tables


@dataclass(frozen=True)
class LanguageKind:
    """Language runs as this process, one of `ranks`, computes them."""

    watcher: Watcher
    ranks: Ranks = ALONE
    name: ClassVar[Kind] = LANGUAGE
    changeable: ClassVar[Sequence[str]] = ("layout", "rollout.engine", "records")

    @contextmanager
    def open(self, config: RunConfig, run_dir: Path | None, start: Start | None = None) -> Iterator[LanguageExecution]:
        """PromiseBroken where a rank begins with other weights than the first one."""
        reference = None if start is None else start.reference
        prepared = prepare(config, self.watcher.warm_start, reference, share=True, ranks=self.ranks)
        asked, prompts = config.rollout.prompts_per_iteration, len(prepared.task.problems.train)
        if asked > prompts:
            again = f"there are {prompts} prompts to train on; an iteration asks some of them again"
            self.watcher.warning(f"rollout.prompts_per_iteration = {asked}: {again}")
        networks = prepared.state.policy, prepared.state.own_value_module
        digests = [weights_digest(module.named_parameters()) for module in networks]
        self.ranks.require_same("initial weights", digests)
        accuracy = self._accuracy(config, prepared) if run_dir is not None and start is None else None
        if start is not None:
            go_on_from(start.checkpoint, prepared)
        store = Store() if run_dir is None else ModelStore(run_dir, config, prepared, task_digest(prepared))
        del start  # as large as weights and moments together
        logs = None if run_dir is None else run_dir / "sglang"
        with quick_collections(), _rollout_engine(config, prepared.engine, logs, self.watcher, self.ranks) as engine:
            yield LanguageExecution(config, prepared, engine, self.ranks, store, self.watcher, accuracy)

    def _accuracy(self, config: RunConfig, prepared: Prepared) -> Accuracy | None:
        """How accurate the policy is before its first step; the watcher hears of it where that is too little."""
        accuracy = policy_accuracy(config, prepared.task.prompt_ids, prepared.state.policy)
        prepared.state.rest()
        if accuracy is not None and accuracy.is_low:
            self.watcher.warning(accuracy.sentence())
        return accuracy


@contextmanager
def _rollout_engine(
    config: RunConfig, built_in: TorchEngine, folder: Path | None, watcher: Watcher, ranks: Ranks
) -> Iterator[Engine]:
    """`built_in`, or one of SGLang servers with its policy and end tokens; they end with the block.

    The first of several processes has the servers. `folder` is for their logs and notes; None for a temporary one.
    """
    settings = config.rollout.engine
    if not isinstance(settings, SGLangServers):
        yield built_in
        return
    from ppo_repro.rollout.sglang.engine import SharedEngine, sglang_engine

    if not ranks.is_first:
        yield SharedEngine(ranks, None)
        return
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ppo-sglang-")))

        def waiting(seconds: int) -> None:
            watcher.servers(seconds, settings.timeout_s)

        about = config, settings, built_in.policy, built_in.stop_ids, folder, waiting
        servers = stack.enter_context(sglang_engine(*about))
        yield servers if ranks.size == 1 else SharedEngine(ranks, servers)
