"""The engine that samples for a language run: built-in, SGLang servers, the user's own, or recorded samples.

A user's engine promises no bits, so it cannot sample the same tokens again. A resumed or repeated run reads its samples
from the records, and computes everything that follows from them again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.base.ranks import Ranks
from ppo_repro.base.watcher import Watcher
from ppo_repro.config.rollout import OwnEngine, SGLangServers
from ppo_repro.config.run import RunConfig
from ppo_repro.models.state import TrainState
from ppo_repro.own_sampler.engine import EngineProcess, OwnSampler, sampled
from ppo_repro.records import reader
from ppo_repro.records.folder import ENGINE_NAME, SERVERS_NAME
from ppo_repro.rollout.engine import Completion, Dialogue, Engine, Request, Sampling
from ppo_repro.rollout.shared import EvaluatedHere, SharedEngine
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.runs.prepare import Prepared


@dataclass(frozen=True)
class Recorded:
    """The recorded iterations of a run, from 0."""

    run_dir: Path
    iterations: int


@dataclass(frozen=True)
class RecordedSampler:
    """Returns the recorded samples of recorded iterations, and samples with `engine` after them."""

    recorded: Recorded
    state: TrainState  # knows the iteration
    engine: Engine

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        if sampling.greedy or self.state.iteration >= self.recorded.iterations:
            return self.engine.generate(requests, sampling, dialogue)
        by_seed = _recorded_completions(self.recorded.run_dir, self.state.iteration)
        try:
            return [by_seed[request.seed, request.prompt_ids] for request in requests]
        except KeyError as error:
            where = f"{self.recorded.run_dir}: iteration {self.state.iteration}"
            raise UserError(f"{where} has no response to a prompt of this run; restore its prompts") from error


def _recorded_completions(run_dir: Path, iteration: int) -> dict[tuple[int, tuple[int, ...]], Completion]:
    """Return the completions of an iteration by seed and prompt."""
    columns = ["seed", "prompt_ids", "response_ids", "finish_reason"]
    rows = reader.read_sequences(run_dir, iterations=[iteration], columns=columns, allow_incomplete=True)
    tokens = reader.read_tokens(run_dir, iterations=[iteration], columns=["rollout_logprobs"], allow_incomplete=True)
    logprobs, start, found = tokens["rollout_logprobs"].to_numpy(), 0, {}
    for seed, prompt_ids, ids, reason in zip(*(rows[name] for name in columns), strict=True):
        end = start + len(ids)
        found[seed, tuple(prompt_ids.tolist())] = sampled(ids.tolist(), logprobs[start:end].tolist(), reason)
        start = end
    return found


@contextmanager
def own_engine(config: RunConfig, ranks: Ranks, recorded: Recorded | None) -> Iterator[EngineProcess | None]:
    """Start the user's engine, which ends with the block; yield None in a process that does not use it.

    The first of several processes uses it. Raises UserError if its file, its class or one of its methods is wrong.
    """
    settings, is_recorded = config.rollout.engine, recorded is not None and recorded.iterations >= config.iterations
    if not isinstance(settings, OwnEngine) or is_recorded or not ranks.is_first:
        yield None
        return
    engine = EngineProcess(settings)
    try:
        yield engine
    finally:
        engine.end()


@contextmanager
def rollout_engine(
    config: RunConfig,
    prepared: Prepared,
    own: EngineProcess | None,
    run_dir: Path | None,
    recorded: Recorded | None,
    watcher: Watcher,
    ranks: Ranks,
) -> Iterator[Engine]:
    """Yield the engine of a run, and stop what it started when the block ends. The first of several processes owns it.

    Args:
        config: names the engine.
        prepared: has the built-in engine.
        own: the user's engine, if the run has one.
        run_dir: for logs, notes and weights; None for a temporary folder.
        recorded: samples that need not be drawn.
        watcher: receives the waiting times of servers.
        ranks: the first one samples if the engine is not built in.
    """
    settings, built_in = config.rollout.engine, prepared.engine
    if isinstance(settings, SGLangServers):
        with _servers(config, settings, built_in, run_dir, watcher, ranks) as engine:
            yield engine
    elif isinstance(settings, OwnEngine):
        with _place(run_dir, ENGINE_NAME) as folder:
            sampler = None
            if own is not None:
                policy, tokenizer = prepared.state.policy, prepared.task.tokenizer
                context = config.numerics.max_context
                sampler = OwnSampler(own, policy, tokenizer, built_in.stop_ids, context, folder)
            asked = EvaluatedHere(SharedEngine(ranks, sampler), built_in)
            try:
                yield asked if recorded is None else RecordedSampler(recorded, prepared.state, asked)
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # the weights that it loaded last
    else:
        yield built_in


@contextmanager
def _servers(
    config: RunConfig,
    settings: SGLangServers,
    built_in: TorchEngine,
    run_dir: Path | None,
    watcher: Watcher,
    ranks: Ranks,
) -> Iterator[Engine]:
    """Yield SGLang servers with the policy and end tokens of the built-in engine."""
    from ppo_repro.sglang.engine import sglang_engine

    if not ranks.is_first:
        yield SharedEngine(ranks, None)
        return

    def waiting(seconds: int) -> None:
        watcher.servers(seconds, settings.timeout_s)

    with (
        _place(run_dir, SERVERS_NAME) as folder,
        sglang_engine(config, settings, built_in.policy, built_in.stop_ids, folder, waiting) as servers,
    ):
        yield servers if ranks.size == 1 else SharedEngine(ranks, servers)


@contextmanager
def _place(run_dir: Path | None, name: str) -> Iterator[Path]:
    """Yield a folder `name` in the run folder, or a temporary folder if `run_dir` is None."""
    if run_dir is not None:
        yield run_dir / name
        return
    with tempfile.TemporaryDirectory(prefix="ppo-sampler-") as temporary:
        yield Path(temporary) / name
