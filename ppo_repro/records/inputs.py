"""Find the inputs of a recorded run by their digests, compare the setups of two runs, and plan forks.

config.yaml in the run folder names the copies of inputs by paths relative to this folder.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.config import files
from ppo_repro.config.inputs import INPUTS_FOLDER, Inputs, digest_of, gather, run_folder
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import Experiment
from ppo_repro.records import manifest
from ppo_repro.records.folder import CONFIG_NAME, FINAL_STATE, REFERENCE, check_config, starts_of
from ppo_repro.records.manifest import Head, Manifest, Origin
from ppo_repro.records.reader import check_file

# what decides the weights and the unit of values; held-out prompts, end tokens and tokenizer are compared by value when
# the fork is prepared
FIXED = (
    "seed", "model", "lora", "value.kind", "value.init", "value.lora", "value.normalize_returns", "numerics.mode",
    "mismatch.sampler.lag",
)  # fmt: skip


def located_tree(
    run_dir: Path, recorded: Head, elsewhere: Path | None = None, model_too: bool = True
) -> dict[str, Any]:
    """Read the recorded configuration as a tree, with the paths at which the run's inputs are now.

    Copies are compared with their digests. Inputs that were not copied are searched at their old path, at the same
    relative path near the run folder, and below `elsewhere`.

    Args:
        run_dir: the recorded run.
        recorded: its manifest.
        elsewhere: another folder to search for models that moved.
        model_too: whether the model of the policy is needed.

    Raises:
        UserError: a file is missing or has changed.
    """
    check_config(run_dir, recorded)
    tree: dict[str, Any] = files.read_tree(run_dir / CONFIG_NAME)
    for name, digest in recorded.inputs.items():
        if name.startswith(f"{INPUTS_FOLDER}/"):
            try:
                check_file(run_dir / name, digest)
            except UserError as error:
                use = f"edit a file of your own and `ppo-repro fork {shlex.quote(str(run_dir))}` with it"
                raise UserError(f"{error}; restore it, or {use}") from error
    for field, section, name in files.path_fields(tree):
        wanted = {
            PurePath(known).name: digest for known, digest in recorded.inputs.items() if known.startswith(f"{field}/")
        }
        if wanted and (model_too or field != "model.path"):
            section[name] = str(_found(run_dir, field, Path(section[name]), wanted, elsewhere))
    return tree


def _found(run_dir: Path, field: str, path: Path, wanted: Mapping[str, str], elsewhere: Path | None) -> Path:
    """Find a file, or a folder with files, that has the wanted digests, and return its path."""
    is_file = set(wanted) == {path.name}
    for place in _places(run_dir, path.parent if is_file else path, elsewhere):
        if all((place / n).is_file() and digest_of(place / n) == digest for n, digest in wanted.items()):
            return place / path.name if is_file else place
    searched = "" if elsewhere is None else f", nor is it below {elsewhere}"
    raise UserError(
        f"{field} = {path}: is not there as the run {run_dir.name} had it{searched}; "
        "say with --inputs DIR where it is now"
    )


def _places(run_dir: Path, folder: Path, elsewhere: Path | None) -> Iterator[Path]:
    """Yield folders to search: the recorded folder, its like near the run folder, all folders below `elsewhere`."""
    yield folder
    for parent in run_dir.resolve().parents:
        for length in range(1, len(folder.parts)):
            yield parent.joinpath(*folder.parts[-length:])
    if elsewhere is not None:
        yield elsewhere
        for path, folders, _ in os.walk(elsewhere):
            yield from (Path(path) / name for name in sorted(folders))


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a parsed configuration by dotted field."""
    children: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {n: v for name, child in children for n, v in flat(child, f"{path}.{name}" if path else str(name)).items()}
    return found or {path: value}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return [before, after] of every entry in which two flat mappings differ; None stands for a missing entry."""
    names = dict.fromkeys([*before, *after])
    # by their text: 1, 1.0 and true are equal values
    return {n: [before.get(n), after.get(n)] for n in names if repr(before.get(n)) != repr(after.get(n))}


def config_changes(before: Experiment, after: Experiment) -> dict[str, list[Any]]:
    """Return [before, after] of every field in which two configurations differ, by dotted path."""
    return changes(*(flat(config.model_dump(mode="json")) for config in (before, after)))


def change_lines(changed: Mapping[str, list[Any]]) -> list[str]:
    """Return each change as text, with shortened digests."""
    return [f"{name}: {shown(before)} -> {shown(after)}" for name, (before, after) in changed.items()]


def shown(value: Any) -> str:
    """Return a value as text; a digest is shortened."""
    if value is None:
        return "none"
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else str(value)


def forked_from(origin: Origin, name: str) -> str:
    """Return the origin of a fork as text; `name` is the origin's folder name."""
    return f"{name} after iteration {origin.iteration}, fingerprint {origin.fingerprint[:12]}..."


def origin_lines(origin: Origin) -> list[str]:
    """Return the origin of a fork and its changed fields as lines of text."""
    return [f"forked from {forked_from(origin, origin.run)}", *(f"  {line}" for line in change_lines(origin.changed))]


@dataclass(frozen=True)
class Fork:
    """The plan of a fork."""

    config: RunConfig
    source: Path  # folder of the run from which it continues
    recorded: Manifest  # of that run
    origin: Origin
    folder: Path  # of the fork


def plan_fork(source: Path, at: int | None, overrides: Sequence[str], out: Path, elsewhere: Path | None) -> Fork:
    """Plan a run that continues from a checkpoint of another run.

    Args:
        source: the recorded run.
        at: iterations of the checkpoint; None: the newest one.
        overrides: changed fields, as after --set.
        out: the folder of runs.
        elsewhere: another folder to search for models that moved.

    Raises:
        UserError: there is no such checkpoint, nothing is left to compute, or a field cannot be changed.
    """
    recorded = manifest.load(source)
    if recorded.kind != files.LANGUAGE:
        raise UserError(f"{source}: a {recorded.kind} run has no checkpoint to fork from; start a run of its own")
    path, tree = str(source / CONFIG_NAME), located_tree(source, recorded, elsewhere)
    before = files.build_config(copy.deepcopy(tree), path)
    files.apply_overrides(tree, overrides)
    config = files.build_config(tree, path)
    old, new = gather(before), gather(config)
    changed = config_changes(old.config, new.config) | changes(old.digests, new.digests)
    changed = {field: values for field, values in changed.items() if not _is_same_folder(field, old, new)}
    for field in changed:
        if any(f"{field}.".startswith(f"{fixed}.") for fixed in FIXED):
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
    # of a run that is not complete the fingerprint is the last link of its chain
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
            f"ppo.iterations = {iterations}: leaves nothing to compute after iteration {at or min(starts)}; "
            f"set it higher, or choose another --at of {listed}"
        )
    return max(left) if at is None else at
