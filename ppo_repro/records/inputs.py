"""The inputs of a recorded run: copies in its folder, and models that are found again by their digests.

config.yaml in the run folder names the copies, by paths that start there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from ppo_repro.config.files import path_fields, read_tree
from ppo_repro.config.inputs import FOLDER, digest_of
from ppo_repro.errors import UserError
from ppo_repro.records.folder import CONFIG_NAME, check_config
from ppo_repro.records.manifest import Head
from ppo_repro.records.reader import check_file


def located_tree(
    run_dir: Path, recorded: Head, elsewhere: Path | None = None, model_too: bool = True
) -> dict[str, Any]:
    """The recorded configuration as a tree that names the inputs that the run had.

    Copies are compared with their digests. What was not copied is looked for where it was, at the same place beside the
    run folder, and below `elsewhere`. UserError if a file is nowhere. `model_too`: the model of the policy as well.
    """
    check_config(run_dir, recorded)
    tree: dict[str, Any] = read_tree(run_dir / CONFIG_NAME)
    for name, digest in recorded.inputs.items():
        if name.startswith(f"{FOLDER}/"):
            try:
                check_file(run_dir / name, digest)
            except UserError as error:
                use = f"edit a file of your own and `ppo-repro fork {run_dir}` with it"
                raise UserError(f"{error}; restore it, or {use}") from error
    for field, section, name in path_fields(tree):
        wanted = {
            PurePath(known).name: digest for known, digest in recorded.inputs.items() if known.startswith(f"{field}/")
        }
        if wanted and (model_too or field != "model.path"):
            section[name] = str(_found(run_dir, field, Path(section[name]), wanted, elsewhere))
    return tree


def _found(run_dir: Path, field: str, path: Path, wanted: Mapping[str, str], elsewhere: Path | None) -> Path:
    """The path of a file, or of a folder with files, that have these digests."""
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
    """Folders in which to look: the recorded one, its like around the run folder, everything below `elsewhere`."""
    yield folder
    for parent in run_dir.resolve().parents:
        for length in range(1, len(folder.parts)):
            yield parent.joinpath(*folder.parts[-length:])
    if elsewhere is not None:
        yield elsewhere
        for path, folders, _ in os.walk(elsewhere):
            yield from (Path(path) / name for name in sorted(folders))


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The values of a parsed configuration by dotted field."""
    children: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {n: v for name, child in children for n, v in flat(child, f"{path}.{name}" if path else str(name)).items()}
    return found or {path: value}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """[before, after] of every entry of two flat mappings that differs; None where one lacks it."""
    names = dict.fromkeys([*before, *after])
    return {n: [before.get(n), after.get(n)] for n in names if before.get(n) != after.get(n)}


def change_lines(changed: Mapping[str, list[Any]]) -> list[str]:
    """Each change in words, digests cut."""
    return [f"{name}: {shown(before)} -> {shown(after)}" for name, (before, after) in changed.items()]


def shown(value: Any) -> str:
    """A value in words; of a digest the beginning."""
    if value is None:
        return "none"
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else str(value)
