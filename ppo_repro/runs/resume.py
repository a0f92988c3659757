"""Resume a run, to the fingerprint of the uninterrupted run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from ppo_repro.base.clock import Clock, as_text
from ppo_repro.base.errors import UserError
from ppo_repro.config.inputs import digest_of
from ppo_repro.config.kinds import AnyConfig
from ppo_repro.config.rollout import OwnEngine, SGLangServers
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import sorted_json
from ppo_repro.records import folder, manifest
from ppo_repro.records.manifest import Head, Manifest
from ppo_repro.records.notes import read_environments, resumed_notes
from ppo_repro.records.writer import RunWriter
from ppo_repro.runs.environment import describe_code, describe_environment
from ppo_repro.runs.execute import execute, work_along
from ppo_repro.runs.kind import Config, Item, RunKind
from ppo_repro.runs.machines import on_every_machine
from ppo_repro.runs.recorded_inputs import Continued, continued
from ppo_repro.runs.run import NO_TRACKING, end_by_error, writing
from ppo_repro.runs.starting_point import load_newest
from ppo_repro.runs.verify_files import Verified, verify_files


@dataclass(frozen=True)
class Resumed:
    """The state of a run when it was resumed."""

    start: int  # iterations of the checkpoint, 0 without one
    recorded: int  # iterations recorded by then; iterations from `start` on were computed again and compared


def resume(
    kind: RunKind[Config, Item],
    run_dir: Path,
    overrides: Sequence[str] = (),
    elsewhere: Path | None = None,
    tracking: AbstractContextManager[object] = NO_TRACKING,
) -> Resumed:
    """Continue a run from its newest checkpoint, or from the beginning, until it is complete.

    If there are several processes, the first one records.

    Args:
        overrides: fields, as after --set, that must not change a bit.
        elsewhere: another folder to search for models that moved.
        tracking: copies the run to trackers; this context is open while this process has the run's lock.

    Raises:
        UserError: another process writes the run, the run is finished, one of its files is damaged, an input is missing
            or an override could change a result. The run folder is unchanged then.
        PromiseBroken: an iteration computed again differs from its record.
    """
    clock, ranks = Clock(), kind.ranks
    ranks.first(manifest.load, run_dir)  # before a lock is put beside a folder that is no run
    with writing(ranks, run_dir):
        plan = ranks.first(_to_resume, kind, run_dir, overrides, elsewhere)
        with on_every_machine(ranks, plan.config, lambda: plan.files) as (config, here):
            start = load_newest(here(run_dir), plan.recorded)
            resumed = Resumed(0 if start is None else start.checkpoint.iteration, plan.recorded.num_iterations)
            ranks.require_same("iterations to go on from", (resumed.start, resumed.recorded))
            again = kind.over(run_dir, resumed.recorded)
            if not ranks.is_first:
                work_along(again, config, start)
                return resumed
            files = _files_to_go_on_with(run_dir, plan.recorded, resumed.start)
            contents = verify_files(run_dir, plan.recorded.model_copy(update={"files": files}))
            clock.lap("inputs")
            environment = {
                **describe_environment(config, ranks.size, describe_code()),
                folder.STARTED: as_text(clock.started),
            }
            tree = {
                "iteration": resumed.start,
                "recorded": resumed.recorded,
                "overrides": list(overrides),
                "environment": environment,
            }
            with tracking:
                try:
                    _mark_resumed(run_dir, plan.recorded, files, contents, tree)
                    clock.lap("records")
                    execute(again, config, run_dir, start, clock)
                except BaseException as error:
                    end_by_error(run_dir, error)
    return resumed


def _mark_resumed(
    run_dir: Path, recorded: Manifest, files: Mapping[str, str], contents: Verified, note: Mapping[str, Any]
) -> None:
    """Write into the manifest that the run is running with these files, and remove what ended processes began."""
    written = RunWriter(run_dir)
    written.list_files(files)
    written.mark("running")
    remove_unfinished(run_dir, recorded, contents)
    written.note(f"resumed-{len(resumed_notes(recorded)) + 1:03d}.json", note)


def remove_unfinished(run_dir: Path, recorded: Manifest, contents: Verified) -> None:
    """Remove what ended processes had begun to write. `recorded` lists all files that stay.

    Raises UserError if that fails.
    """
    if contents.unfinished_line:
        manifest.cut_log(run_dir, recorded.log_bytes)
    try:
        for name in contents.unfinished:
            (run_dir / name).unlink(missing_ok=True)  # a manifest.json.tmp has become manifest.json
        for inside in sorted((run_dir / folder.CHECKPOINTS_NAME).rglob("*/"), reverse=True):  # inner folders first
            if folder.MODEL_FOLDER.match(inside.relative_to(run_dir).as_posix()) and not any(inside.iterdir()):
                inside.rmdir()
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be cleared ({error.strerror}); make the run folder writable") from error


def _to_resume(
    kind: RunKind[Config, Item], run_dir: Path, overrides: Sequence[str], elsewhere: Path | None
) -> Continued[Config]:
    """Find the newest checkpoint of a run to resume, and its inputs."""
    recorded = manifest.load(run_dir)
    if recorded.status == "complete":
        raise UserError(f"{run_dir}: the run is finished; look at it with `ppo-repro show {shlex.quote(str(run_dir))}`")
    starts = folder.starts_of(run_dir, recorded)
    start = starts[max(starts)] if starts else None
    changeable = (*kind.changeable, *kind.resumed_alone)
    plan = continued(kind, run_dir, recorded, overrides, changeable, elsewhere, start)
    before = folder.load_any_recorded_config(run_dir, recorded)
    require_same_layout(before, plan.config)
    require_same_processes(plan.config, read_environments(run_dir, recorded)[-1]["processes"], kind.ranks.size)
    if isinstance(before, RunConfig) and isinstance(plan.config, RunConfig):
        require_same_sampler(before, plan.config)
    return plan


def _files_to_go_on_with(run_dir: Path, recorded: Head, start: int) -> dict[str, str]:
    """Return the manifest's files without the dump of unequal bits and without checkpoints that the user removed.

    If the run begins again (`start` is 0), all checkpoints and models are left out.
    """
    dropped = PurePath(folder.CHECKPOINTS_NAME if start == 0 else folder.UNEQUAL)
    return {
        name: digest
        for name, digest in recorded.files.items()
        if not PurePath(name).is_relative_to(dropped)
        and (folder.CHECKPOINT.fullmatch(name) is None or (run_dir / name).exists())
    }


def require_same_layout(recorded: AnyConfig, config: AnyConfig) -> None:
    """Raise UserError for another layout if it may change results: in native numerics, or if stock code samples."""
    before, now = recorded.layout.model_dump(), config.layout.model_dump()
    changed = next((name for name in now if now[name] != before[name]), None)
    setting = _machine_dependent(config)
    if isinstance(config, RunConfig):
        engine = config.rollout.engine
        if isinstance(engine, SGLangServers) and engine.numerics == "stock" and not engine.urls:
            setting = setting or "rollout.engine.numerics = stock"  # the run starts the servers by its layout
    if changed is not None and setting is not None:
        raise UserError(
            f"--set layout.{changed}={now[changed]}: the run has {before[changed]}, and with {setting} "
            "another layout may give other bits; leave it out, or use `ppo-repro run` for a run of its own"
        )


def require_same_processes(config: AnyConfig, recorded: int, now: int) -> None:
    """Raise UserError for another number of processes if it may change results."""
    setting = _machine_dependent(config)
    if now != recorded and setting is not None:
        raise UserError(
            f"processes = {now}: the run has {recorded}, and with {setting} another number may give other bits; start "
            f"`resume` with {recorded}, or use `ppo-repro run` for a run of its own"
        )


def _machine_dependent(config: AnyConfig) -> str | None:
    """Return the setting with which stock torch computes; None if the kernels compute every number."""
    if isinstance(config, RunConfig):
        return config.machine_dependent_setting
    return "numerics.mode = native" if config.numerics.mode == "native" else None


def require_same_sampler(recorded: RunConfig, config: RunConfig) -> None:
    """Raise UserError if the engine of `config` would sample other bits than the engine of `recorded`.

    In deterministic numerics the built-in engine and SGLang give the same bits. In other numerics the engine, its
    arguments and the number of servers may each change a bit; addresses and timeouts do not.
    """
    before, now = _sampler(recorded), _sampler(config)
    if before != now:
        both = f"would sample with {now.description}, and the run samples with {before.description}"
        raise UserError(
            f"rollout.engine: {both}, which gives other bits; leave rollout.engine as it is recorded, or use "
            "`ppo-repro run` for a run of its own"
        )


@dataclass(frozen=True)
class _Sampler:
    """All settings that decide the sampled bits, and a description of them."""

    settings: tuple[object, ...]
    description: str = field(compare=False)


def _sampler(config: RunConfig) -> _Sampler:
    engine = config.rollout.engine
    if isinstance(engine, OwnEngine):
        file, _, name = engine.path.rpartition(":")
        digest = digest_of(Path(file))
        description = f"{name} of a file of SHA-256 {digest[:12]}, parameters {engine.parameters}"
        return _Sampler((name, digest, sorted_json(engine.parameters)), description)
    if not isinstance(engine, SGLangServers) or engine.numerics == "deterministic":
        return _Sampler((config.numerics.mode,), f"{config.numerics.mode} numerics")
    numerics = "SGLang's own numerics"
    if engine.urls:
        count = len(engine.urls)
        return _Sampler((numerics, count), f"{numerics} (servers that run already: {count})")
    arguments = shlex.join(engine.arguments) or "none"
    description = f"{numerics} (servers: {engine.servers}, arguments: {arguments})"
    return _Sampler((numerics, engine.servers, engine.arguments), description)
