"""The configuration and the notes in a run folder, checked against the manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_repro.config.files import MODELS, build_config, read_tree, validated
from ppo_repro.config.run import ControlConfig, DPOConfig, RunConfig
from ppo_repro.config.yaml_text import read_yaml
from ppo_repro.records import manifest
from ppo_repro.records.manifest import Head
from ppo_repro.records.reader import read_checked

CONFIG_NAME = "config.yaml"
ENVIRONMENT_NAME = "environment.json"
RESUMED = "resumed-*.json"


def check_config(run_dir: Path, recorded: Head) -> None:
    """Raise UserError unless config.yaml is what was written when the run was started."""
    read_checked(run_dir / CONFIG_NAME, recorded.files[CONFIG_NAME])


def load_recorded_config(run_dir: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration a language run was started with; UserError where it or the manifest is missing or damaged."""
    folder = Path(run_dir)
    check_config(folder, manifest.load_head(folder))
    path = folder / CONFIG_NAME
    return build_config(read_tree(path, overrides, ("run",)), str(path))


def recorded_tree(run_dir: Path, recorded: Head) -> dict[str, Any]:
    """config.yaml as it is written, its paths not resolved; UserError where it is missing or damaged."""
    check_config(run_dir, recorded)
    tree: dict[str, Any] = read_yaml(run_dir / CONFIG_NAME)
    return tree


def load_config_of(run_dir: Path, recorded: Head) -> RunConfig | ControlConfig | DPOConfig:
    """The configuration a run of any kind was started with; UserError where it is missing or damaged."""
    check_config(run_dir, recorded)
    path = run_dir / CONFIG_NAME
    return validated(MODELS[recorded.kind], read_tree(path), str(path))


def read_note(run_dir: Path, recorded: Head, name: str) -> dict[str, Any]:
    """A JSON file of a run folder, checked against the manifest; UserError where it is missing or damaged."""
    tree: dict[str, Any] = json.loads(read_checked(run_dir / name, recorded.notes[name]))
    return tree


def resumed_notes(recorded: Head) -> list[str]:
    """The name of the note of every time the run was resumed."""
    return sorted(name for name in recorded.notes if Path(name).match(RESUMED))


def read_environments(run_dir: Path, recorded: Head) -> list[dict[str, Any]]:
    """environment.json, then those of every time the run was resumed; UserError where one is missing or damaged."""
    resumed = [read_note(run_dir, recorded, name)["environment"] for name in resumed_notes(recorded)]
    return [read_note(run_dir, recorded, ENVIRONMENT_NAME), *resumed]
