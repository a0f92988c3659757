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
    config: RunConfig, prepared: Prepared, watcher: Watcher
) -> Iterator[tuple[Iteration, dict[str, pa.Table]]]:
    for item in ppo_iterations(config, prepared.task, prepared.state, prepared.engine):
        yield item, iteration_tables(item, prepared.task, config)
        rewards = item.rewards
        watcher.iteration(
            item.index + 1,
            config.ppo.iterations,
            exact_mean(rewards.scores),
            exact_mean(rewards.is_correct),
            item.updates[-1].approx_kl,
        )


def _final_results(config: RunConfig, prepared: Prepared, initial_digest: str) -> Final:
    evaluation = evaluate(config, prepared.task, prepared.engine)
    return {
        "eval_accuracy": evaluation.accuracy,
        "eval_score": evaluation.score,
        "initial_policy_digest": initial_digest,
        "policy_digest": weights_digest(prepared.state.policy.named_parameters()),
        "value_digest": weights_digest(prepared.state.value_model.named_parameters()),
    }


@contextmanager
def _recording(run_dir: Path) -> Iterator[None]:
    """Whatever ends the run early is noted in its manifest; before the first iteration, nothing is left behind."""
    try:
        yield
    except BaseException as error:
        # as it is on disk: the error may have come between the file and our copy of it
        current = manifest.load(run_dir)
        if current.iterations:
            writer.mark(run_dir, current, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        else:
            shutil.rmtree(run_dir)
        raise


def run(config: RunConfig, out: Path, watcher: Watcher) -> tuple[Path, dict[str, float]]:
    """Execute a configuration and record everything; returns the run folder and wall seconds by phase.

    UserError for anything the user has to correct; a run that fails midway keeps its complete iterations.
    """
    started = time.perf_counter()
    run_dir = run_folder(config, out)
    inputs = file_digests(run_inputs(config))
    writer.create_run(run_dir, dump_yaml(config), describe_environment(config), config.digest(), inputs)
    seconds = {"records": 0.0}
    with _recording(run_dir):
        current = manifest.load(run_dir)
        prepared = prepare(config, watcher.warm_start)
        initial = weights_digest(prepared.state.policy.named_parameters())
        seconds["preparation"] = time.perf_counter() - started
        for item, tables in _iterate(config, prepared, watcher):
            before = time.perf_counter()
            current = writer.append_iteration(run_dir, current, item.index, tables)
            seconds["records"] += time.perf_counter() - before
            for phase, spent in item.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + spent
        final = _final_results(config, prepared, initial)
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


def rerun(run_dir: Path, watcher: Watcher, overrides: Sequence[str] = ()) -> Rerun:
    """Execute a recorded configuration again, in memory, and compare every buffer with the files as they are.

    `overrides` may change the layout, which must not change a bit. Stops at the first difference. UserError
    if the run is incomplete, its inputs have changed or an override is not of the layout.
    """
    recorded = reader.open_manifest(run_dir)
    for override in overrides:
        if not override.startswith("layout."):
            raise UserError(f"--set {override}: a rerun may change layout fields only; use `ppo-repro run` instead")
    config = load_config(run_dir / "config.yaml", overrides)
    check_inputs(recorded)
    prepared = prepare(config, watcher.warm_start)
    initial = weights_digest(prepared.state.policy.named_parameters())
    fingerprint = digests.FINGERPRINT_SEED
    for item, tables in _iterate(config, prepared, watcher):
        links = {table.name: digests.table_digest(table, tables[table.name]) for table in schema.TABLES}
        fingerprint = digests.chain(fingerprint, links)
        for table in schema.TABLES:
            old = reader.read_recorded(run_dir, recorded, table, item.index, verify=False)
            difference = first_table_difference(table, old, tables[table.name], item.index)
            if difference is not None:
                return Rerun(difference, fingerprint, item.index + 1)
    final = _final_results(config, prepared, initial)
    fingerprint = digests.chain(fingerprint, {k: digests.scalar_digest(v) for k, v in final.items()})
    return Rerun(first_final_difference(recorded.final, final), fingerprint, config.ppo.iterations)
