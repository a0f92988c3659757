"""Find the inputs of a recorded run by their digests.

config.yaml in the run folder names the copies of inputs by paths relative to this folder.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import read_tree
from ppo_repro.config.inputs import INPUTS_FOLDER, digest_of
from ppo_repro.config.tree import path_fields
from ppo_repro.records.folder import CONFIG_NAME, checked_config_path
from ppo_repro.records.manifest import Head
from ppo_repro.records.reader import check_file


def located_tree(
    run_dir: Path, recorded: Head, elsewhere: Path | None = None, model_too: bool = True
) -> dict[str, Any]:
    """Read the recorded configuration as a tree, with the paths at which the run's inputs are now.

    Copies are compared with their digests. Inputs that were not copied are searched at their old path, at the same
    relative path near the run folder, and below `elsewhere`.

    Args:
        elsewhere: another folder to search for models that moved.
        model_too: whether the model of the policy is needed.

    Raises:
        UserError: a file is missing or has changed.
    """
    checked_config_path(run_dir, recorded)
    tree: dict[str, Any] = read_tree(run_dir / CONFIG_NAME)
    for name, digest in recorded.inputs.items():
        if name.startswith(f"{INPUTS_FOLDER}/"):
            try:
                check_file(run_dir / name, digest)
            except UserError as error:
                use = f"edit a file of your own and `ppo-repro fork {shlex.quote(str(run_dir))}` with it"
                raise UserError(f"{error}; restore it, or {use}") from error
    for field, section, name in path_fields(tree):
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
