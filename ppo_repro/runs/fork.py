"""Execute forks: new runs that begin with a copy of another run's records, and continue from its checkpoint."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

from ppo_repro.base.clock import Clock
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import SUMS_NAME, atomic_write
from ppo_repro.buffers import Iteration
from ppo_repro.config.run import RunConfig
from ppo_repro.records import manifest
from ppo_repro.records.folder import ACCURACY_NAME, FORKED_FROM, REFERENCE
from ppo_repro.records.label import UNLABELLED, Label
from ppo_repro.runs import checkpoint
from ppo_repro.runs.fork_plan import Fork
from ppo_repro.runs.kind import RunKind
from ppo_repro.runs.language import PROMPTS
from ppo_repro.runs.machine_memory import require_memory
from ppo_repro.runs.machines import files_of, on_every_machine
from ppo_repro.runs.run import NO_TRACKING, Inherited, compute_new, writing
from ppo_repro.runs.starting_point import Start, load_start, start_files
from ppo_repro.runs.verify_files import verify_files
from ppo_repro.stages.coefficients import first_coefficients

WARM_START = "warm_start_steps"  # the only preparation that a fork does not repeat


def fork(
    kind: RunKind[RunConfig, Iteration],
    plan: Fork,
    clock: Clock,
    tracking: AbstractContextManager[object] = NO_TRACKING,
    label: Label = UNLABELLED,
) -> None:
    """Make the run of a plan and compute it to its end.

    If there are several processes, the first one records.

    Args:
        tracking: copies the run to trackers; this context is open while this process has the run's lock.

    Raises:
        UserError: a file of the origin is damaged.
    """
    ranks, files = kind.ranks, partial(_files, plan)
    with writing(ranks, plan.folder), tracking, on_every_machine(ranks, plan.config, files) as (config, here):
        if ranks.is_first:
            verify_files(plan.source, plan.recorded)
        plan = replace(plan, config=config, source=here(plan.source))
        require_memory(config, ranks.size, ranks.rank)
        start = _start(plan)
        inherited = Inherited(start, plan.origin.fingerprint, partial(_take_over, plan, start))
        compute_new(kind, config, plan.folder, clock, label, inherited)


def _files(plan: Fork) -> list[Path]:
    files = files_of(plan.config.model_dump(mode="json"))
    return [*files, *start_files(plan.source, plan.recorded, plan.checkpoint)]


def _start(plan: Fork) -> Start:
    """Return the origin's checkpoint. Coefficients whose fields changed are reset, and prompts may differ."""
    first = first_coefficients(plan.config.kl, plan.config.ppo.objective)
    start = load_start(plan.source, plan.recorded, plan.checkpoint)
    coefficients = start.checkpoint.coefficients
    if any(field.startswith("kl.") for field in plan.origin.changed):
        coefficients = replace(coefficients, kl_coef=first.kl_coef)
    if any(field.startswith("ppo.objective") for field in plan.origin.changed):
        coefficients = replace(coefficients, clip_range=first.clip_range, penalty_coef=first.penalty_coef)
    task = {name: digest for name, digest in start.checkpoint.task.items() if name != PROMPTS}
    precision = plan.config.numerics.precision
    saved = replace(start.checkpoint, coefficients=coefficients, precision=precision, task=task)
    return Start(saved, start.reference)


def _take_over(plan: Fork, start: Start, folder: Path) -> int:
    """Copy checkpoint, reference and records of the origin into a new run folder; return the number of iterations."""
    recorded, source, at = plan.recorded, plan.source, plan.origin.iteration
    before = [table for i in range(at) for table in manifest.recorded_at(recorded, i)]
    before += [table for table in manifest.recorded_at(recorded, None) if table.table.name == WARM_START]
    names = [table.path(Path()) for table in before]
    if start.reference is not None:
        names += [path.relative_to(source) for path in sorted(start.reference.rglob("*")) if path.is_file()]
    # in another precision the policy has another accuracy, which is measured again
    notes = {ACCURACY_NAME} & recorded.notes.keys() if "numerics.precision" not in plan.origin.changed else set()
    names += map(Path, notes)
    try:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _same_file(source / name, folder / name)
        lines = (source / manifest.LOG_NAME).read_bytes()[: recorded.log_bytes].splitlines(keepends=True)[:at]
    except OSError as error:
        raise UserError(f"{plan.folder}: cannot be made ({error.strerror}); choose another --out") from error
    atomic_write(folder / manifest.LOG_NAME, b"".join(lines))
    head = manifest.load_head(folder)
    files = {**head.files, FORKED_FROM: checkpoint.save(start.checkpoint, folder / FORKED_FROM)}
    if start.reference is not None:
        files[f"{REFERENCE}/{SUMS_NAME}"] = recorded.files[f"{REFERENCE}/{SUMS_NAME}"]
    changes = {
        "origin": plan.origin,
        "files": files,
        "notes": {**head.notes, **{name: recorded.notes[name] for name in notes}},
        "preparation": {name: entry for name, entry in recorded.preparation.items() if name == WARM_START},
        "num_iterations": at,
        "log_bytes": sum(map(len, lines)),
        "log_digest": reduce(manifest.extended, lines, ""),
        "fingerprint": plan.origin.fingerprint,
    }
    manifest.save(head.model_copy(update=changes), folder)
    return at


def _same_file(source: Path, target: Path) -> None:
    """Link a file, which no run changes in place; copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
