"""Running a configuration, and running a recorded one again to compare every bit."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ppo_repro.buffers import Iteration
from ppo_repro.config.files import dump_yaml
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import PromiseBroken, UserError
from ppo_repro.loop import Clock, ppo_iterations
from ppo_repro.numerics.arithmetic.grid import exact_mean
from ppo_repro.numerics.optim.optimizer import weights_digest
from ppo_repro.ranks import ALONE, Ranks
from ppo_repro.records import digests, manifest, reader, writer
from ppo_repro.records.background import appending
from ppo_repro.records.config_file import load_recorded_config
from ppo_repro.records.manifest import Manifest
from ppo_repro.rollout.engine import Engine
from ppo_repro.runs import checkpoints
from ppo_repro.runs.checkpoint import Checkpoint
from ppo_repro.runs.diff import Difference, first_final_difference, first_table_difference
from ppo_repro.runs.environment import describe_environment, file_digests
from ppo_repro.runs.garbage import quick_collections
from ppo_repro.runs.lifetime import new_run
from ppo_repro.runs.open_engine import check_engine, rollout_engine
from ppo_repro.runs.prepare import Prepared, prepare, run_inputs
from ppo_repro.runs.profiling import measure_peak
from ppo_repro.runs.tables import iteration_tables
from ppo_repro.shares import check_shares
from ppo_repro.stages.coefficients import last_kl
from ppo_repro.stages.evaluation import evaluate
from ppo_repro.watcher import Watcher

Final = dict[str, float | int | str]


def run_folder(config: RunConfig, out: Path) -> Path:
    """OUT/<experiment>/seed<seed>-<config digest>."""
    return out / config.experiment / f"seed{config.seed}-{config.digest()}"


def _tell(watcher: Watcher, config: RunConfig, item: Iteration) -> None:
    rewards = item.rewards
    watcher.iteration(
        item.index + 1,
        config.ppo.iterations,
        exact_mean(rewards.scores),
        exact_mean(rewards.is_correct),
        last_kl(item.updates),
    )


def _iterations(config: RunConfig, prepared: Prepared, engine: Engine, ranks: Ranks) -> Iterator[Iteration]:
    return ppo_iterations(config, prepared.task, prepared.state, engine, ranks)


def _prepare(
    config: RunConfig, inputs: Mapping[str, str], watcher: Watcher, ranks: Ranks, start_folder: Path | None
) -> Prepared:
    """The run before its first iteration; PromiseBroken where a rank has other weights than the first one."""

    def warm_start(step: int, total: int, loss: float) -> None:
        ranks.check()  # every rank computes the whole warm start by itself
        watcher.warm_start(step, total, loss)

    ranks.require_same("configuration", config.digest())
    ranks.require_same("input files", sorted(inputs.values()))
    prepared = prepare(config, warm_start, start_folder)
    weights = prepared.state.policy.named_parameters(), prepared.state.value_parameters().items()
    ranks.require_same("initial weights", [weights_digest(parameters) for parameters in weights])
    return prepared


def _final_results(config: RunConfig, prepared: Prepared, engine: Engine, ranks: Ranks) -> Final:
    evaluation = evaluate(config, prepared.task, engine, ranks)
    training = prepared.reward_training
    judged = {} if training is None else {"reward_model_pair_accuracy": training.accuracy_after}
    return {
        **judged,
        "eval_accuracy": evaluation.accuracy,
        "eval_score": evaluation.score,
        # the reference is what the policy was before the first step
        "initial_policy_digest": weights_digest(prepared.state.reference.named_parameters()),
        "policy_digest": weights_digest(prepared.state.policy.named_parameters()),
        "value_digest": weights_digest(prepared.state.value_parameters().items()),
    }


def run(
    config: RunConfig, out: Path, watcher: Watcher, ranks: Ranks = ALONE, profile: bool = False
) -> tuple[Path, dict[str, float]]:
    """Execute a configuration and record everything; returns the run folder and wall seconds by phase.

    `profile`: measure what the machine can do first, and record which share of it every iteration reached.
    UserError for anything the user has to correct; a run that fails midway keeps its complete iterations.
    Of several ranks the first one records.
    """
    check_shares(config.layout.rank_shares, ranks.size)
    check_engine(config, ranks.size)
    run_dir = run_folder(config, out)
    inputs = file_digests(run_inputs(config))
    if not ranks.is_first:
        return run_dir, _work_along(config, inputs, watcher, ranks)
    environment = describe_environment(config, ranks.size)
    temporary = writer.lay_out_run(run_dir, dump_yaml(config), environment, config.digest(), inputs)
    with new_run(temporary, run_dir):
        seconds = execute(run_dir, config, watcher, None, ranks, profile)
    return run_dir, seconds


def _work_along(config: RunConfig, inputs: Mapping[str, str], watcher: Watcher, ranks: Ranks) -> dict[str, float]:
    """What a rank does that does not record: everything else."""
    prepared = _prepare(config, inputs, watcher, ranks, None)
    for item in _iterations(config, prepared, prepared.engine, ranks):
        _tell(watcher, config, item)
    _final_results(config, prepared, prepared.engine, ranks)
    return {}


def execute(
    run_dir: Path,
    config: RunConfig,
    watcher: Watcher,
    start: Checkpoint | None,
    ranks: Ranks = ALONE,
    profile: bool = False,
) -> dict[str, float]:
    """Do what is left of a run, from a checkpoint or from the beginning; returns wall seconds by phase.

    An iteration that is recorded already is compared instead: PromiseBroken names the first cell that differs.
    """
    started = time.perf_counter()
    recorded = manifest.load(run_dir)
    current = manifest.head_of(recorded)
    start_folder = None if start is None else checkpoints.reference_folder(run_dir)
    prepared = _prepare(config, current.inputs, watcher, ranks, start_folder)
    origin = checkpoints.begin(run_dir, config, prepared, start)
    peak = measure_peak(config, prepared.state) if profile else None
    seconds = {"records": 0.0, "preparation": time.perf_counter() - started}
    with (
        quick_collections(),
        rollout_engine(config, prepared.engine, run_dir / "sglang", watcher) as engine,
        appending(run_dir, current) as appender,
    ):
        written: Iteration | None = None
        for item in _iterations(config, prepared, engine, ranks):
            clock = Clock()
            tables = iteration_tables(item, config, peak)
            current = appender.settle()
            if written is not None:
                _tell(watcher, config, written)  # only of what is on disk
            if item.index < recorded.num_iterations:
                require_same(run_dir, recorded, item.index, tables)
            else:
                appender.start(item.index, tables)
            written = item
            clock.lap("records")
            if checkpoints.is_due(config, item.index + 1):
                current = appender.settle()  # a checkpoint names the chain it follows
                clock.lap("records")
                # while the run is not complete its fingerprint is the last link
                again = item.index < recorded.num_iterations
                link = recorded.iterations[item.index].chain if again else current.fingerprint
                checkpoints.write(run_dir, config, prepared.state, link, origin)
                gc.collect()  # see runs.garbage
                clock.lap("checkpoints")
            for phase, spent in [*clock.seconds.items(), *item.seconds.items()]:
                seconds[phase] = seconds.get(phase, 0.0) + spent
        current = appender.settle()
        if written is not None:
            _tell(watcher, config, written)
        final = _final_results(config, prepared, engine, ranks)
    checkpoints.save_final(run_dir, config, prepared)
    writer.finish(run_dir, current, final)
    seconds["total"] = time.perf_counter() - started
    return seconds


def _iteration_difference(
    run_dir: Path, recorded: Manifest, iteration: int, tables: Mapping[str, pa.Table]
) -> Difference | None:
    """The first cell of an iteration that differs between the files as they are and `tables`."""
    for table in manifest.tables_of(recorded):
        old = reader.read_recorded(run_dir, recorded, table, iteration, verify=False)
        difference = first_table_difference(table, old, tables[table.name], iteration)
        if difference is not None:
            return difference
    return None


def require_same(run_dir: Path, recorded: Manifest, iteration: int, tables: Mapping[str, pa.Table]) -> None:
    """Raise PromiseBroken naming the first cell of a recorded iteration that `tables` has otherwise."""
    difference = _iteration_difference(run_dir, recorded, iteration, tables)
    if difference is not None:
        raise PromiseBroken(f"{difference.describe()}; the left is recorded, the right was computed now")
    for table in manifest.tables_of(recorded):
        entry = recorded.iterations[iteration].tables[table.name]
        if digests.table_digest(table, tables[table.name]) != entry.digest:
            path = manifest.table_path(run_dir, table.name, iteration)
            raise UserError(f"{path}: does not match the manifest; the file was changed or damaged")


@dataclass(frozen=True)
class Rerun:
    """What running again showed."""

    difference: Difference | None
    fingerprint: str  # of the new execution, as far as it went
    iterations: int


def check_inputs(inputs: Mapping[str, str]) -> None:
    """Raise UserError if a file that the run was made from is gone or has changed; SHA-256 by path."""
    for path, digest in inputs.items():
        if file_digests([Path(path)])[str(Path(path).resolve())] != digest:
            raise UserError(f"{path}: changed since the run was recorded; restore it")


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise UserError for an override that could change a result of a recorded run."""
    for override in overrides:
        if not override.startswith(("layout.", "rollout.engine.", "rollout.engine=")):
            raise UserError(
                f"--set {override}: a recorded run may change layout fields only (of language models rollout.engine "
                "too); use `ppo-repro run` instead"
            )


def compared(
    run_dir: Path, recorded: Manifest, iteration: int, tables: Mapping[str, pa.Table], fingerprint: str
) -> tuple[str, Difference | None]:
    """The fingerprint with this iteration added, and the first difference from the recorded one."""
    links = {t.name: digests.table_digest(t, tables[t.name]) for t in manifest.tables_of(recorded)}
    return digests.chain(fingerprint, links), _iteration_difference(run_dir, recorded, iteration, tables)


def rerun(run_dir: Path, watcher: Watcher, overrides: Sequence[str] = (), ranks: Ranks = ALONE) -> Rerun:
    """Execute a recorded configuration again, in memory, and compare every buffer with the files as they are.

    `overrides` may change layout and rollout engine, which must not change a bit. Stops at the first difference.
    UserError if the run is incomplete, its inputs have changed or an override is of anything else. Of several
    ranks the first one compares; all return what it found.
    """
    recorded = reader.open_manifest(run_dir)
    check_overrides(overrides)
    config = load_recorded_config(run_dir, overrides)
    check_shares(config.layout.rank_shares, ranks.size)
    check_engine(config, ranks.size)
    check_inputs(recorded.inputs)
    prepared = _prepare(config, recorded.inputs, watcher, ranks, None)
    fingerprint = digests.FINGERPRINT_SEED
    with rollout_engine(config, prepared.engine, None, watcher) as engine:
        for item in _iterations(config, prepared, engine, ranks):
            tables = iteration_tables(item, config)
            fingerprint, difference = ranks.first(compared, run_dir, recorded, item.index, tables, fingerprint)
            if difference is not None:
                return Rerun(difference, fingerprint, item.index + 1)
            _tell(watcher, config, item)
        final = _final_results(config, prepared, engine, ranks)
    fingerprint = digests.chain(fingerprint, {k: digests.scalar_digest(v) for k, v in final.items()})
    return Rerun(first_final_difference(recorded.final, final), fingerprint, config.ppo.iterations)
