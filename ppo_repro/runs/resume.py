"""Going on with a run that was killed, interrupted or failed, to the result it would have had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.disk import durable
from ppo_repro.disk.folder import check_links, only_writer
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, writer
from ppo_repro.records.config_file import check_config
from ppo_repro.records.manifest import Manifest
from ppo_repro.runs import checkpoints
from ppo_repro.runs.checkpoint import Checkpoint
from ppo_repro.runs.environment import describe_environment
from ppo_repro.runs.lifetime import mark_ended
from ppo_repro.runs.open_engine import require_same_sampler
from ppo_repro.runs.prepare import task_inputs
from ppo_repro.runs.run import check_inputs, check_overrides, execute
from ppo_repro.watcher import Watcher


@dataclass(frozen=True)
class Resumed:
    """What was found when a run was resumed."""

    start: int  # iterations of the checkpoint, 0 without one
    recorded: int  # iterations recorded by then; those from `start` on were computed again and compared


def resume(run_dir: Path, watcher: Watcher, overrides: Sequence[str] = ()) -> Resumed:
    """Continue a run from its newest checkpoint, or from the beginning, until it is complete.

    `overrides` may change layout and rollout engine, which must not change a bit. UserError if another process
    writes the run, it is finished, its checkpoint is damaged, its inputs have changed, an override is of anything
    else or an engine would sample other bits; then nothing has changed.
    PromiseBroken if an iteration computed again differs from its record.
    """
    check_overrides(overrides)
    manifest.load(run_dir)  # before a lock is put into a folder that is no run
    check_links(run_dir)
    with only_writer(run_dir):
        recorded = manifest.load(run_dir)
        if recorded.status == "complete":
            raise UserError(f"{run_dir}: the run is finished; look at it with `ppo-repro show {run_dir}`")
        writer.require_current_format(run_dir, recorded)
        config = _config(run_dir, recorded, overrides)
        start = checkpoints.load_newest(run_dir, recorded)
        _check_inputs(recorded, config, start)
        found = Resumed(0 if start is None else start.iteration, recorded.num_iterations)
        notes = _note(run_dir, config, found, overrides)
        try:
            writer.mark(run_dir, recorded, "running", notes)
            execute(run_dir, config, watcher, start)
        except BaseException as error:
            mark_ended(run_dir, error)
            raise
    return found


def _config(run_dir: Path, recorded: Manifest, overrides: Sequence[str]) -> RunConfig:
    check_config(run_dir, recorded)
    config = load_config(run_dir / "config.yaml", overrides)
    require_same_sampler(load_config(run_dir / "config.yaml"), config)
    return config


def _check_inputs(recorded: Manifest, config: RunConfig, start: Checkpoint | None) -> None:
    """The model's files are needed only where there is no checkpoint, which has its own."""
    if start is None:
        check_inputs(recorded.inputs)
    else:
        needed = {str(path.resolve()) for path in task_inputs(config)}
        check_inputs({path: digest for path, digest in recorded.inputs.items() if path in needed})


def _note(run_dir: Path, config: RunConfig, found: Resumed, overrides: Sequence[str]) -> dict[str, str]:
    """Write what this part of the run runs on, beside the environment of the first part; its digest by file name."""
    name = f"resumed-{len(list(run_dir.glob('resumed-*.json'))) + 1:03d}.json"
    tree = {"iteration": found.start, "overrides": list(overrides), "environment": describe_environment(config, 1)}
    content = manifest.note_content(tree)
    durable.atomic_write(run_dir / name, content)
    return {name: manifest.note_digest(content)}
