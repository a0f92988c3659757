"""Running a configuration, and running a recorded one again to compare every bit."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ppo_repro.config import RunConfig
from ppo_repro.config_yaml import dump_yaml, load_config
from ppo_repro.errors import UserError
from ppo_repro.loop import Iteration, ppo_iterations
from ppo_repro.numerics.grid import exact_mean
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.ranks import ALONE, Ranks, check_shares
from ppo_repro.records import digests, manifest, reader, schema, writer
from ppo_repro.records.manifest import Manifest
from ppo_repro.records.tables import iteration_tables
from ppo_repro.runs.diff import Difference, first_final_difference, first_table_difference
from ppo_repro.runs.environment import describe_environment, file_digests
from ppo_repro.runs.prepare import Prepared, prepare, run_inputs
from ppo_repro.runs.progress import Watcher
from ppo_repro.stages import evaluate

Final = dict[str, float | int | str]


def run_folder(config: RunConfig, out: Path) -> Path:
    """OUT/<experiment>/seed<seed>-<config digest>."""
    return out / config.experiment / f"seed{config.seed}-{config.digest()}"


def _iterate(
    config: RunConfig, prepared: Prepared, watcher: Watcher, ranks: Ranks
) -> Iterator[tuple[Iteration, dict[str, pa.Table]]]:
    """Every iteration, on the first rank with its tables."""
    for item in ppo_iterations(config, prepared.task, prepared.state, prepared.engine, ranks):
        yield item, iteration_tables(item, prepared.task, config) if ranks.is_first else {}
        rewards = item.rewards
        watcher.iteration(
            item.index + 1,
            config.ppo.iterations,
            exact_mean(rewards.scores),
            exact_mean(rewards.is_correct),
            item.updates[-1].approx_kl,
        )


def _prepare(config: RunConfig, inputs: dict[str, str], watcher: Watcher, ranks: Ranks) -> tuple[Prepared, str]:
    """The run before its first iteration and the digest of its policy; PromiseBroken where a rank has another."""

    def warm_start(step: int, total: int, loss: float) -> None:
        ranks.check()  # every rank computes the whole warm start by itself
        watcher.warm_start(step, total, loss)

    ranks.require_same("configuration", config.digest())
    ranks.require_same("input files", sorted(inputs.values()))
    prepared = prepare(config, warm_start)
    models = prepared.state.policy, prepared.state.value_model
    initial, values = (weights_digest(model.named_parameters()) for model in models)
    ranks.require_same("initial weights", (initial, values))
    return prepared, initial


def _final_results(config: RunConfig, prepared: Prepared, initial_digest: str, ranks: Ranks) -> Final:
    evaluation = evaluate(config, prepared.task, prepared.engine, ranks)
    return {
        "eval_accuracy": evaluation.accuracy,
        "eval_score": evaluation.score,
        "initial_policy_digest": initial_digest,
        "policy_digest": weights_digest(prepared.state.policy.named_parameters()),
        "value_digest": weights_digest(prepared.state.value_model.named_parameters()),
    }


@contextmanager
def _recording(run_dir: Path, ranks: Ranks) -> Iterator[None]:
    """Whatever ends the run early is noted in its manifest; before the first iteration, nothing is left behind."""
    try:
        yield
    except BaseException as error:
        if not ranks.is_first:
            raise
        # as it is on disk: the error may have come between the file and our copy of it
        current = manifest.load(run_dir)
        if current.iterations:
            writer.mark(run_dir, current, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        else:
            shutil.rmtree(run_dir)
        raise


def run(config: RunConfig, out: Path, watcher: Watcher, ranks: Ranks = ALONE) -> tuple[Path, dict[str, float]]:
    """Execute a configuration and record everything; returns the run folder and wall seconds by phase.

    UserError for anything the user has to correct; a run that fails midway keeps its complete iterations.
    Of several ranks the first one records.
    """
    started = time.perf_counter()
    check_shares(config.layout.rank_shares, ranks.size)
    run_dir = run_folder(config, out)
    inputs = file_digests(run_inputs(config))
    if ranks.is_first:
        environment = describe_environment(config, ranks.size)
        writer.create_run(run_dir, dump_yaml(config), environment, config.digest(), inputs)
    seconds = {"records": 0.0}
    with _recording(run_dir, ranks):
        current = manifest.load(run_dir) if ranks.is_first else None
        prepared, initial = _prepare(config, inputs, watcher, ranks)
        seconds["preparation"] = time.perf_counter() - started
        for item, tables in _iterate(config, prepared, watcher, ranks):
            before = time.perf_counter()
            if current is not None:
                current = writer.append_iteration(run_dir, current, item.index, tables)
            seconds["records"] += time.perf_counter() - before
            for phase, spent in item.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + spent
        final = _final_results(config, prepared, initial, ranks)
        if current is not None:
            _save_policy(prepared, run_dir / "checkpoints" / "final")
            writer.finish(run_dir, current, final)
    seconds["total"] = time.perf_counter() - started
    return run_dir, seconds


def _save_policy(prepared: Prepared, folder: Path) -> None:
    """The trained policy and its tokenizer as a transformers folder; appears whole or not at all."""
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        temporary.mkdir(parents=True)
        prepared.state.policy.save_pretrained(temporary)
        prepared.task.tokenizer.save_pretrained(temporary)
        os.replace(temporary, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); make room there") from error


@dataclass(frozen=True)
class Rerun:
    """What running again showed."""

    difference: Difference | None
    fingerprint: str  # of the new execution, as far as it went
    iterations: int


def check_inputs(recorded: Manifest) -> None:
    """Raise UserError if a file that the run was made from is gone or has changed."""
    for path, digest in recorded.inputs.items():
        if file_digests([Path(path)])[str(Path(path).resolve())] != digest:
            raise UserError(f"{path}: changed since the run was recorded; restore it to rerun")


def _compared(
    run_dir: Path, recorded: Manifest, iteration: int, tables: dict[str, pa.Table], fingerprint: str
) -> tuple[str, Difference | None]:
    """The fingerprint with this iteration added, and the first difference from the recorded one."""
    links = {table.name: digests.table_digest(table, tables[table.name]) for table in schema.TABLES}
    fingerprint = digests.chain(fingerprint, links)
    for table in schema.TABLES:
        old = reader.read_recorded(run_dir, recorded, table, iteration, verify=False)
        difference = first_table_difference(table, old, tables[table.name], iteration)
        if difference is not None:
            return fingerprint, difference
    return fingerprint, None


def rerun(run_dir: Path, watcher: Watcher, overrides: Sequence[str] = (), ranks: Ranks = ALONE) -> Rerun:
    """Execute a recorded configuration again, in memory, and compare every buffer with the files as they are.

    `overrides` may change the layout, which must not change a bit. Stops at the first difference. UserError
    if the run is incomplete, its inputs have changed or an override is not of the layout. Of several ranks the
    first one compares; all return what it found.
    """
    recorded = reader.open_manifest(run_dir)
    for override in overrides:
        if not override.startswith("layout."):
            raise UserError(f"--set {override}: a rerun may change layout fields only; use `ppo-repro run` instead")
    config = load_config(run_dir / "config.yaml", overrides)
    check_shares(config.layout.rank_shares, ranks.size)
    check_inputs(recorded)
    prepared, initial = _prepare(config, recorded.inputs, watcher, ranks)
    fingerprint = digests.FINGERPRINT_SEED
    for item, tables in _iterate(config, prepared, watcher, ranks):
        fingerprint, difference = ranks.first(_compared, run_dir, recorded, item.index, tables, fingerprint)
        if difference is not None:
            return Rerun(difference, fingerprint, item.index + 1)
    final = _final_results(config, prepared, initial, ranks)
    fingerprint = digests.chain(fingerprint, {k: digests.scalar_digest(v) for k, v in final.items()})
    return Rerun(first_final_difference(recorded.final, final), fingerprint, config.ppo.iterations)
