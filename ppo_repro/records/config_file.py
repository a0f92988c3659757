"""The configuration and the environment in a run folder, checked against the manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_repro.config.files import load_config, read_tree
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import tree_digest
from ppo_repro.errors import UserError
from ppo_repro.records import manifest
from ppo_repro.records.manifest import Head


def check_config(run_dir: Path, recorded: Head) -> None:
    """Raise UserError unless config.yaml says what it said when the run was started.

    The text is compared, not the loaded configuration: fields added later are in no old digest. `records` is in no
    digest: it decides how much is written down, of the same results.
    """
    path = run_dir / "config.yaml"
    if tree_digest(read_tree(path)) != recorded.config_digest:
        raise UserError(f"{path}: is not the configuration the run was started with; restore it")


def load_recorded_config(run_dir: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration a language run was started with; UserError where it or the manifest is missing or damaged."""
    folder = Path(run_dir)
    check_config(folder, manifest.load_head(folder))
    return load_config(folder / "config.yaml", overrides)


def read_environment(path: Path) -> dict[str, Any]:
    """environment.json or resumed-NNN.json of a run folder; UserError where it is missing or no JSON object."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); restore it") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must hold one JSON object; restore it")
    return tree


def check_notes(run_dir: Path, recorded: Head) -> None:
    """Raise UserError where environment.json or a resumed-NNN.json is damaged, or missing though the manifest lists it.

    A note that the manifest does not list, because of a kill or an older version, is only parsed.
    """
    resumed = {path.name for path in run_dir.glob("resumed-*.json")}
    for name in sorted({"environment.json", *resumed, *recorded.notes}):
        read_environment(run_dir / name)
        digest = manifest.note_digest((run_dir / name).read_bytes())
        if digest != recorded.notes.get(name, digest):
            raise UserError(f"{run_dir / name}: is not what was noted when the run was started or resumed; restore it")
