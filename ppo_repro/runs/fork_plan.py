"""Plan a fork without importing torch, which takes seconds. `fork.py` carries the plan out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.config.fields import marked_fields
from ppo_repro.config.files import build_config
from ppo_repro.config.inputs import Inputs, gather, run_folder
from ppo_repro.config.kinds import LANGUAGE
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import FIXED
from ppo_repro.config.tree import apply_overrides
from ppo_repro.records import manifest
from ppo_repro.records.changes import changes, config_changes
from ppo_repro.records.folder import CONFIG_NAME, FINAL_STATE, REFERENCE, starts_of
from ppo_repro.records.located import located_tree
from ppo_repro.records.manifest import Manifest, Origin


@dataclass(frozen=True)
class Fork:
    """The plan of a fork."""

    config: RunConfig
    source: Path  # folder of the run from which it continues
    recorded: Manifest  # manifest of `source`
    origin: Origin
    folder: Path  # run folder of the fork

    @property
    def checkpoint(self) -> str | None:
        """Return the name of the checkpoint with which the fork begins; None for the end of a complete run."""
        return starts_of(self.source, self.recorded).get(self.origin.iteration)


def plan_fork(source: Path, at: int | None, overrides: Sequence[str], out: Path, elsewhere: Path | None) -> Fork:
    """Plan a run that continues from a checkpoint of another run.

    Args:
        at: iterations of the checkpoint; None: the newest one.
        overrides: changed fields, as after --set.
        elsewhere: another folder to search for models that moved.

    Raises:
        UserError: there is no such checkpoint, nothing is left to compute, or a field cannot be changed.
    """
    recorded = manifest.load(source)
    if recorded.kind != LANGUAGE:
        raise UserError(f"{source}: a {recorded.kind} run has no checkpoint to fork from; start a run of its own")
    path, tree = str(source / CONFIG_NAME), located_tree(source, recorded, elsewhere)
    before = build_config(copy.deepcopy(tree), path)
    apply_overrides(tree, overrides)
    config = build_config(tree, path)
    old, new = gather(before), gather(config)
    changed = config_changes(old.config, new.config) | changes(old.digests, new.digests)
    changed = {field: values for field, values in changed.items() if not _is_same_folder(field, old, new)}
    for field in changed:
        if any(f"{field}.".startswith(f"{fixed}.") for fixed in marked_fields(RunConfig, FIXED)):
            raise UserError(
                f"--set {field}: a fork goes on with the weights of its origin, so it cannot change this field; start "
                "a run of its own"
            )
    if "numerics.precision" in changed and config.model.kind == "tiny" and not (source / REFERENCE).is_dir():
        raise UserError(
            f"--set numerics.precision: {source} keeps no reference, and its warm start was in the other precision; "
            "record it with checkpoints.every > 0"
        )
    start = _start(source, recorded, at, config.iterations)
    # an incomplete run has no fingerprint; the last link of its chain stands for it
    origin = Origin(
        run=str(source.resolve()),
        iteration=start,
        fingerprint=recorded.iterations[start - 1].chain,
        changed=changed,
    )
    return Fork(config, source, recorded, origin, run_folder(config, out, origin.fingerprint))


def _is_same_folder(field: str, old: Inputs, new: Inputs) -> bool:
    """Return whether a field names folders with the same files in both runs, wherever the folders are."""
    files_of = ({n: d for n, d in inputs.digests.items() if n.startswith(f"{field}/")} for inputs in (old, new))
    before, after = files_of
    return before == after != {}


def _start(source: Path, recorded: Manifest, at: int | None, iterations: int) -> int:
    starts = set(starts_of(source, recorded))
    if FINAL_STATE in recorded.files:
        starts.add(recorded.num_iterations)
    listed = ", ".join(map(str, sorted(starts)))
    if not starts:
        raise UserError(f"{source}: has no checkpoint to fork from; checkpoints.every = 10 in a run keeps some")
    if at is not None and at not in starts:
        raise UserError(
            f"--at {at}: {source} has no checkpoint of this iteration; choose one of {listed}, or give a run "
            "checkpoints.every = 1 and checkpoints.keep = all, which keep every iteration"
        )
    left = [start for start in starts if start < iterations]
    if not left or (at is not None and at >= iterations):
        raise UserError(
            f"ppo.iterations = {iterations}: leaves nothing to compute after {at or min(starts)} iterations; "
            f"set it higher, or choose another --at of {listed}"
        )
    return max(left) if at is None else at
