"""Running a control configuration, going on with a killed run, and running a recorded one again bit by bit.

There are no checkpoints: the state inside an environment cannot be saved in general. A run that was ended is
computed again from its beginning, which takes minutes, and compared as far as it is recorded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pyarrow as pa

from ppo_repro.config.control import ControlConfig, load_control_config
from ppo_repro.config.files import dump_yaml
from ppo_repro.control.loop import ControlIteration, control_iterations, prepare
from ppo_repro.control.stages import evaluate
from ppo_repro.control.tables import finished_returns, iteration_tables
from ppo_repro.control.update import ControlState
from ppo_repro.disk.folder import check_links, only_writer
from ppo_repro.errors import UserError
from ppo_repro.loop import Clock
from ppo_repro.numerics.optim.optimizer import weights_digest
from ppo_repro.records import digests, manifest, reader, writer
from ppo_repro.records.manifest import Manifest
from ppo_repro.runs.diff import first_final_difference
from ppo_repro.runs.environment import describe_environment
from ppo_repro.runs.lifetime import mark_ended, new_run
from ppo_repro.runs.run import Final, Rerun, check_overrides, compared, require_same
from ppo_repro.watcher import Watcher

LAST = 100  # training episodes in the mean that CleanRL reports


@dataclass
class _Running:
    """A run while it is computed, and the returns of its episodes so far, in the order in which they ended."""

    config: ControlConfig
    state: ControlState
    watcher: Watcher
    initial_digest: str = ""
    returns: list[float] = field(default_factory=list)

    def iterate(self) -> Iterator[tuple[ControlIteration, dict[str, pa.Table]]]:
        self.initial_digest = weights_digest(self.state.agent.policy_parameters())
        for item in control_iterations(self.config, self.state):
            self.returns += finished_returns(item)
            yield item, iteration_tables(item)
            done, total = item.index + 1, self.config.ppo.iterations
            self.watcher.control(done, total, self._last_mean(), item.updates[-1].approx_kl)

    def _last_mean(self) -> float:
        last = self.returns[-LAST:]
        return math.fsum(last) / len(last) if last else math.nan

    def final_results(self) -> Final:
        agent = self.state.agent
        return {
            "episodes": len(self.returns),
            "last_100_return": self._last_mean(),
            "eval_return": evaluate(self.config, agent),
            "initial_policy_digest": self.initial_digest,
            "policy_digest": weights_digest(agent.policy_parameters()),
            "value_digest": weights_digest(agent.value_parameters()),
        }


def _environment(config: ControlConfig) -> dict[str, object]:
    found = describe_environment(config, 1)
    return {**found, "packages": {**found["packages"], "gymnasium": metadata.version("gymnasium")}}


def run(config: ControlConfig, out: Path, watcher: Watcher) -> tuple[Path, dict[str, float]]:
    """Execute a configuration and record everything; returns the run folder and wall seconds by phase.

    UserError for anything the user has to correct; a run that fails midway keeps its complete iterations.
    """
    run_dir = out / config.experiment / f"seed{config.seed}-{config.digest()}"
    temporary = writer.lay_out_run(run_dir, dump_yaml(config), _environment(config), config.digest(), {}, "control")
    with new_run(temporary, run_dir):
        seconds = _execute(run_dir, config, watcher)
    return run_dir, seconds


def _execute(run_dir: Path, config: ControlConfig, watcher: Watcher) -> dict[str, float]:
    """Compute the whole run; iterations that are recorded already are compared, the others recorded."""
    started = time.perf_counter()
    recorded = manifest.load(run_dir)
    current = manifest.head_of(recorded)
    running = _Running(config, prepare(config), watcher)
    seconds = {"records": 0.0, "preparation": time.perf_counter() - started}
    for item, tables in running.iterate():
        clock = Clock()
        if item.index < recorded.num_iterations:
            require_same(run_dir, recorded, item.index, tables)
        else:
            current = writer.append_iteration(run_dir, current, item.index, tables)
        clock.lap("records")
        for phase, spent in [*clock.seconds.items(), *item.seconds.items()]:
            seconds[phase] = seconds.get(phase, 0.0) + spent
    writer.finish(run_dir, current, running.final_results())
    running.state.environments.close()
    seconds["total"] = time.perf_counter() - started
    return seconds


def _recorded_config(run_dir: Path, recorded: Manifest, overrides: Sequence[str]) -> ControlConfig:
    path = run_dir / "config.yaml"
    if load_control_config(path).digest() != recorded.config_digest:
        raise UserError(f"{path}: is not the configuration the run was started with; restore it")
    return load_control_config(path, overrides)


def resume(run_dir: Path, watcher: Watcher, overrides: Sequence[str] = ()) -> int:
    """Complete a run that was ended, computing it again from its beginning; returns how many iterations were recorded.

    UserError if another process writes the run, it is finished or an override is not of the layout. PromiseBroken
    if an iteration computed again differs from its record.
    """
    check_overrides(overrides)
    manifest.load(run_dir)  # before a lock is put into a folder that is no run
    check_links(run_dir)
    with only_writer(run_dir):
        recorded = manifest.load(run_dir)
        if recorded.status == "complete":
            raise UserError(f"{run_dir}: the run is finished; look at it with `ppo-repro show {run_dir}`")
        config = _recorded_config(run_dir, recorded, overrides)
        try:
            writer.mark(run_dir, recorded, "running")
            _execute(run_dir, config, watcher)
        except BaseException as error:
            mark_ended(run_dir, error)
            raise
    return recorded.num_iterations


def rerun(run_dir: Path, watcher: Watcher, overrides: Sequence[str] = ()) -> Rerun:
    """Execute a recorded configuration again, in memory, and compare every buffer with the files as they are.

    `overrides` may change the layout, which must not change a bit. Stops at the first difference. UserError
    if the run is incomplete, its configuration was changed or an override is not of the layout.
    """
    recorded = reader.open_manifest(run_dir)
    check_overrides(overrides)
    config = _recorded_config(run_dir, recorded, overrides)
    running, fingerprint = _Running(config, prepare(config), watcher), digests.FINGERPRINT_SEED
    for item, tables in running.iterate():
        fingerprint, difference = compared(run_dir, recorded, item.index, tables, fingerprint)
        if difference is not None:
            return Rerun(difference, fingerprint, item.index + 1)
    final = running.final_results()
    fingerprint = digests.chain(fingerprint, {k: digests.scalar_digest(v) for k, v in final.items()})
    return Rerun(first_final_difference(recorded.final, final), fingerprint, config.ppo.iterations)
