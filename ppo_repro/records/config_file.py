"""The configuration and the notes in a run folder, checked against the manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_repro.config.control import ControlConfig
from ppo_repro.config.files import absolute_paths, build_config, read_tree, read_tree_for
from ppo_repro.config.kinds import build_config_of
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import tree_digest
from ppo_repro.errors import UserError
from ppo_repro.records import manifest
from ppo_repro.records.manifest import Head

CONFIG_NAME = "config.yaml"
ENVIRONMENT_NAME = "environment.json"
RESUMED = "resumed-*.json"


def check_config(run_dir: Path, recorded: Head) -> None:
    """Raise UserError unless config.yaml is what was written when the run was started.

    Its tree is compared, not the loaded configuration: fields added later are in no old digest, and `records` is in
    none, because it decides how much is written down of the same results. Runs of earlier versions have no digest of
    the text.
    """
    path, expected = run_dir / CONFIG_NAME, recorded.files.get(CONFIG_NAME)
    found = manifest.content_digest(read_checked(run_dir, CONFIG_NAME, None))
    if found != (expected or found) or tree_digest(read_tree(path)) != recorded.config_digest:
        raise UserError(f"{path}: is not the configuration the run was started with; restore it")


def load_recorded_config(run_dir: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration a language run was started with; UserError where it or the manifest is missing or damaged."""
    folder = Path(run_dir)
    check_config(folder, manifest.load_head(folder))
    path = folder / CONFIG_NAME
    return absolute_paths(build_config(_of_today(read_tree_for("run", path, overrides)), str(path)))


def load_config_of(run_dir: Path, recorded: Head) -> RunConfig | ControlConfig:
    """The configuration a run of either kind was started with; UserError where it is missing or damaged."""
    check_config(run_dir, recorded)
    path = run_dir / CONFIG_NAME
    return build_config_of(recorded.kind, _of_today(read_tree(path)), str(path))


def _of_today(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration that version 0.2 recorded, in today's words and without the layouts of its kernels."""
    engine = tree.get("rollout", {}).get("engine", {})
    for section, field in ((tree["numerics"], "mode"), (engine, "numerics")):
        if section.get(field) == "exact":
            section[field] = "deterministic"
    for field in ("backend", "rank_shares", "mesh"):
        tree["layout"].pop(field, None)
    return tree


def read_checked(run_dir: Path, name: str, digest: str | None) -> bytes:
    """The content of a file that the manifest lists; UserError where it is missing or not what was written.

    `digest` is None where an earlier version noted none.
    """
    path = run_dir / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore it") from error
    if digest is not None and manifest.content_digest(content) != digest:
        raise UserError(f"{path}: has another SHA-256 than the manifest says; restore it")
    return content


def read_note(run_dir: Path, recorded: Head, name: str) -> dict[str, Any]:
    """A JSON file of a run folder, checked against the manifest; UserError where it is missing or damaged.

    A note that the manifest does not list, because an earlier version wrote it, is only parsed.
    """
    path = run_dir / name
    try:
        tree = json.loads(read_checked(run_dir, name, recorded.notes.get(name)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); restore it") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must hold one JSON object; restore it")
    return tree


def read_environments(run_dir: Path, recorded: Head) -> list[dict[str, Any]]:
    """environment.json, then those of every time the run was resumed; UserError where one is missing or damaged."""
    names = {name for name in recorded.notes if Path(name).match(RESUMED)}
    if not manifest.is_covered(recorded):
        names |= {path.name for path in run_dir.glob(RESUMED)}
    trees = [read_note(run_dir, recorded, name)["environment"] for name in sorted(names)]
    return [read_note(run_dir, recorded, ENVIRONMENT_NAME), *trees]


def check_notes(run_dir: Path, recorded: Head) -> None:
    """Raise UserError where environment.json or another note is damaged, or missing though the manifest lists it."""
    read_environments(run_dir, recorded)
    for name in sorted(recorded.notes):
        read_note(run_dir, recorded, name)
