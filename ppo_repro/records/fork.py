"""Where a fork begins: at a checkpoint of a recorded run, with some fields or input files changed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.config.files import LANGUAGE, apply_overrides, build_config
from ppo_repro.config.inputs import gather, run_folder
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.records import manifest
from ppo_repro.records.folder import CONFIG_NAME, FINAL_STATE, starts_of
from ppo_repro.records.inputs import change_lines, changes, flat, located_tree
from ppo_repro.records.manifest import Manifest, Origin

# what decides the weights, the tokens and which prompts are held out
FIXED = (
    *("seed", "model", "lora", "value.kind", "value.init", "value.lora", "numerics.mode", "mismatch.sampler.lag"),
    *("task.kind", "task.num_eval_prompts", "task.max_operand", "task.dataset", "task.settings"),
    *("task.size", "task.digits", "task.base"),
)


@dataclass(frozen=True)
class Fork:
    """A fork that can begin."""

    config: RunConfig
    source: Path  # folder of the run that it goes on from
    recorded: Manifest  # of that run
    origin: Origin
    folder: Path  # of the fork


def plan_fork(source: Path, at: int | None, overrides: Sequence[str], out: Path, elsewhere: Path | None) -> Fork:
    """A run that goes on from `source` after `at` iterations, None: the newest checkpoint, with fields changed.

    UserError if there is no such checkpoint, nothing is left to compute, or a field cannot be changed.
    """
    recorded = manifest.load(source)
    if recorded.kind != LANGUAGE:
        raise UserError(f"{source}: a {recorded.kind} run has no checkpoint to fork from; start a run of its own")
    path, tree = str(source / CONFIG_NAME), located_tree(source, recorded, elsewhere)
    before = build_config(copy.deepcopy(tree), path)
    apply_overrides(tree, overrides)
    config = build_config(tree, path)
    old, new = gather(before), gather(config)
    changed = changes(flat(old.tree), flat(new.tree)) | changes(old.digests, new.digests)
    for field in changed:
        if any(f"{field}.".startswith(f"{fixed}.") for fixed in FIXED):
            raise UserError(
                f"--set {field}: a fork goes on with the weights, tokens and held-out prompts of its origin, so it "
                "cannot change this field; start a run of its own"
            )
    start = _start(source, recorded, at, config.iterations)
    # of a run that is not complete the fingerprint is the last link of its chain
    origin = Origin(
        run=str(source.resolve()),
        iteration=start,
        fingerprint=recorded.iterations[start - 1].chain,
        changed=changed,
    )
    return Fork(config, source, recorded, origin, run_folder(config, out, origin.fingerprint))


def _start(source: Path, recorded: Manifest, at: int | None, iterations: int) -> int:
    starts = set(starts_of(source, recorded))
    if FINAL_STATE in recorded.files:
        starts.add(recorded.num_iterations)
    listed = ", ".join(map(str, sorted(starts)))
    if not starts:
        raise UserError(f"{source}: has no checkpoint to fork from; checkpoints.every = 10 in a run keeps some")
    if at is not None and at not in starts:
        raise UserError(f"--at {at}: {source} has no checkpoint of this iteration; choose one of {listed}")
    left = [start for start in starts if start < iterations]
    if not left or (at is not None and at >= iterations):
        raise UserError(
            f"ppo.iterations = {iterations}: leaves nothing to compute after iteration {at or min(starts)}; "
            f"set it higher, or choose another --at of {listed}"
        )
    return max(left) if at is None else at


def forked_from(origin: Origin, name: str) -> str:
    """The origin of a fork in words; `name`: what its folder is called."""
    return f"{name} after iteration {origin.iteration}, fingerprint {origin.fingerprint[:12]}..."


def origin_lines(origin: Origin) -> list[str]:
    """Where a fork comes from and what it changed, in words."""
    return [f"forked from {forked_from(origin, origin.run)}", *(f"  {line}" for line in change_lines(origin.changed))]
