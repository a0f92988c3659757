"""Choose and start the sampler of a run: built-in, SGLang servers, or the user's class."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ppo_repro.base.ranks import Ranks
from ppo_repro.base.watcher import Watcher
from ppo_repro.config.rollout import OwnEngine, SGLangServers
from ppo_repro.config.run import RunConfig
from ppo_repro.models.state import TrainState
from ppo_repro.records.folder import ENGINE_NAME, SERVERS_NAME
from ppo_repro.sampler import Sampler
from ppo_repro.sampling.built_in import BuiltInSampler
from ppo_repro.sampling.own.sampler import OwnProcess, OwnSampler
from ppo_repro.sampling.recorded_samples import Recorded, RecordedSampler
from ppo_repro.sampling.shared import EvaluatedHere, SharedSampler


@dataclass(frozen=True)
class SamplerContext:
    """What a sampler knows of its run before the run is prepared. The first of several processes owns it."""

    config: RunConfig
    run_dir: Path | None  # for logs, notes and weights; None for a temporary folder
    recorded: Recorded | None  # the recorded samples, if the run is resumed or repeated
    watcher: Watcher  # receives the waiting times of servers
    ranks: Ranks


@contextmanager
def own_process(context: SamplerContext) -> Iterator[OwnProcess | None]:
    """Start the process of the user's class, which ends with the block; yield None in a process of the run without one.

    Only the first process of a run has one. Raises UserError if the file, the class or a method is wrong.
    """
    config, recorded = context.config, context.recorded
    settings, is_recorded = config.rollout.engine, recorded is not None and recorded.iterations >= config.iterations
    if not isinstance(settings, OwnEngine) or is_recorded or not context.ranks.is_first:
        yield None
        return
    process = OwnProcess(settings)
    try:
        yield process
    finally:
        process.end()


@contextmanager
def run_sampler(
    context: SamplerContext,
    process: OwnProcess | None,
    built_in: BuiltInSampler,
    state: TrainState,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[Sampler]:
    """Yield the sampler of a prepared run; when the block ends, end the servers that it started.

    `process` is from `own_process`.
    """
    settings, recorded, ranks = context.config.rollout.engine, context.recorded, context.ranks
    if isinstance(settings, SGLangServers):
        with _servers(context, settings, built_in) as sampler:
            yield sampler
    elif isinstance(settings, OwnEngine):
        with _folder(context.run_dir, ENGINE_NAME) as folder:
            first = None
            if process is not None:
                longest = context.config.numerics.max_context
                first = OwnSampler(process, state.policy, tokenizer, built_in.stop_ids, longest, folder)
            sampler = EvaluatedHere(SharedSampler(ranks, first), built_in)
            try:
                yield sampler if recorded is None else RecordedSampler(recorded, state, sampler, ranks)
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # the weights that the class loaded last
    else:
        yield built_in


@contextmanager
def _servers(context: SamplerContext, settings: SGLangServers, built_in: BuiltInSampler) -> Iterator[Sampler]:
    """Yield SGLang servers with the policy and end tokens of the built-in sampler."""
    from ppo_repro.sampling.sglang.sampler import SGLangSampler

    ranks = context.ranks
    if not ranks.is_first:
        yield SharedSampler(ranks, None)
        return

    def waiting(seconds: int) -> None:
        context.watcher.step("SGLang", seconds, settings.timeout_s, "seconds of the longest wait for a server to start")

    with (
        _folder(context.run_dir, SERVERS_NAME) as folder,
        SGLangSampler(context.config, built_in.policy, built_in.stop_ids, folder).running(waiting) as servers,
    ):
        yield servers if ranks.size == 1 else SharedSampler(ranks, servers)


@contextmanager
def _folder(run_dir: Path | None, name: str) -> Iterator[Path]:
    """Yield a folder `name` in the run folder, or a temporary folder if `run_dir` is None."""
    if run_dir is not None:
        yield run_dir / name
        return
    with tempfile.TemporaryDirectory(prefix="ppo-sampler-") as temporary:
        yield Path(temporary) / name
