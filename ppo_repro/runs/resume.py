"""Going on with a run that was killed, interrupted or failed, to the fingerprint of the uninterrupted run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePath

from ppo_repro.clock import Clock, as_text
from ppo_repro.config.files import apply_overrides, build_config_of
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.files import SUMS_NAME, only_writer
from ppo_repro.records import manifest
from ppo_repro.records.folder import (
    CHECKPOINT,
    CHECKPOINTS_NAME,
    CONFIG_NAME,
    REFERENCE,
    STARTED,
    UNEQUAL,
    load_recorded_config,
    resumed_notes,
    starts_of,
)
from ppo_repro.records.inputs import located_tree
from ppo_repro.records.manifest import Head, Manifest
from ppo_repro.records.writer import RunWriter
from ppo_repro.runs.environment import describe_environment
from ppo_repro.runs.kind import Config, Item, RunKind
from ppo_repro.runs.models_kept import load_newest
from ppo_repro.runs.open_engine import require_same_sampler
from ppo_repro.runs.run import execute, mark_ended, require_same_start, work_along
from ppo_repro.runs.verify import check_contents, remove_unfinished


@dataclass(frozen=True)
class Resumed:
    """What was there when a run was resumed."""

    start: int  # iterations of the checkpoint, 0 without one
    recorded: int  # iterations recorded by then; those from `start` on were computed again and compared


def resume(
    kind: RunKind[Config, Item], run_dir: Path, overrides: Sequence[str] = (), elsewhere: Path | None = None
) -> Resumed:
    """Continue a run from its newest checkpoint, or from the beginning, until it is complete.

    `overrides` may change what must not change a bit. `elsewhere`: where models may lie by now. UserError if another
    process writes the run, it is finished, a file of it is damaged, an input is nowhere or an override could change a
    result; then nothing has changed.
    PromiseBroken if an iteration computed again differs from its record. Of several processes the first one records.
    """
    clock, ranks = Clock(), kind.ranks
    manifest.load(run_dir)  # before a lock is put into a folder that is no run
    with only_writer(run_dir) if ranks.is_first else nullcontext():
        recorded = manifest.load(run_dir)
        if recorded.status == "complete":
            raise UserError(f"{run_dir}: the run is finished; look at it with `ppo-repro show {run_dir}`")
        # a checkpoint has the model
        model_too = not starts_of(run_dir, recorded) or f"{REFERENCE}/{SUMS_NAME}" not in recorded.files
        config = recorded_config(kind, run_dir, recorded, overrides, elsewhere, model_too)
        if isinstance(config, RunConfig):
            require_same_sampler(load_recorded_config(run_dir), config)
        start = load_newest(run_dir, recorded)
        resumed = Resumed(0 if start is None else start.checkpoint.iteration, recorded.num_iterations)
        opened = kind.open(config, run_dir if ranks.is_first else None, start)
        del start  # as large as weights and moments together
        require_same_start(ranks, config, recorded.inputs)
        ranks.require_same("iterations to go on from", (resumed.start, resumed.recorded))
        if not ranks.is_first:
            work_along(opened)
            return resumed
        files = _files_to_go_on_with(run_dir, recorded, resumed.start)
        contents = check_contents(run_dir, recorded.model_copy(update={"files": files}))
        clock.lap("inputs")
        environment = {**describe_environment(config, ranks.size), STARTED: as_text(clock.started)}
        tree = {"iteration": resumed.start, "overrides": list(overrides), "environment": environment}
        try:
            written = RunWriter(run_dir)
            written.list_files(files)
            written.mark("running")
            remove_unfinished(run_dir, recorded, contents)
            written.note(f"resumed-{len(resumed_notes(recorded)) + 1:03d}.json", tree)
            clock.lap("records")
            execute(kind, config, run_dir, opened, clock)
        except BaseException as error:
            mark_ended(run_dir, error)
            raise
    return resumed


def recorded_config(
    kind: RunKind[Config, Item],
    run_dir: Path,
    recorded: Manifest,
    overrides: Sequence[str],
    elsewhere: Path | None,
    model_too: bool = True,
) -> Config:
    """The configuration of a recorded run with `overrides`, its inputs found; UserError for what could change a result.

    `model_too`: the model of the policy has to be there.
    """
    groups = " and ".join(kind.changeable)
    for override in overrides:
        if not override.startswith(tuple(f"{group}{end}" for group in kind.changeable for end in ".=")):
            raise UserError(
                f"--set {override}: a recorded run may change fields of {groups} only; for another field "
                f"start a run of its own, or go on from a checkpoint with `ppo-repro fork {run_dir}`"
            )
    tree = located_tree(run_dir, recorded, elsewhere, model_too)
    apply_overrides(tree, overrides)
    config: Config = build_config_of(kind.name, tree, str(run_dir / CONFIG_NAME))  # type: ignore[assignment]
    return config


def _files_to_go_on_with(run_dir: Path, recorded: Head, start: int) -> dict[str, str]:
    """What the manifest lists, without the unequal bits that ended the run, and checkpoints that the user removed.

    Without any checkpoint or model where the run begins again.
    """
    dropped = PurePath(CHECKPOINTS_NAME if start == 0 else UNEQUAL)
    return {
        name: digest
        for name, digest in recorded.files.items()
        if not PurePath(name).is_relative_to(dropped)
        and (CHECKPOINT.fullmatch(name) is None or (run_dir / name).exists())
    }
