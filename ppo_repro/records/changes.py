"""Compare the setups of two runs field by field: configuration, inputs and origin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_repro.config.files import as_written
from ppo_repro.config.kinds import CONFIGS
from ppo_repro.config.section import Experiment
from ppo_repro.config.yaml_text import read_yaml
from ppo_repro.records import manifest
from ppo_repro.records.folder import checked_config_path
from ppo_repro.records.manifest import Head, Origin

Setup = Mapping[str, Any]


def setup_of(run_dir: Path, head: Head) -> dict[str, Any]:
    """Read the setup of a run: fields by dotted name, SHA-256 of inputs, origin of a fork.

    A field that is newer than the run has its default. Raises UserError if config.yaml is damaged.
    """
    path = checked_config_path(run_dir, head)
    config = as_written(CONFIGS[head.kind], read_yaml(path), str(path))
    setup = {**flat(config.model_dump(mode="json")), **head.inputs}
    if head.origin is not None:
        setup["origin"] = f"iteration {head.origin.iteration} ({Path(head.origin.run).name})"
    return setup


def setup_changes(left_dir: Path, right_dir: Path) -> dict[str, list[Any]]:
    """Return [left, right] of each field, input digest and origin in which two runs differ.

    Raises UserError if one of the runs is damaged.
    """
    return changes(*(setup_of(run_dir, manifest.load_head(run_dir)) for run_dir in (left_dir, right_dir)))


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a parsed configuration by dotted field."""
    children: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {n: v for name, child in children for n, v in flat(child, f"{path}.{name}" if path else str(name)).items()}
    return found or {path: value}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return [before, after] of every entry in which two flat mappings differ; None stands for a missing entry."""
    names = dict.fromkeys([*before, *after])
    # compared as text, because 1, 1.0 and true are equal as values
    return {n: [before.get(n), after.get(n)] for n in names if repr(before.get(n)) != repr(after.get(n))}


def config_changes(before: Experiment, after: Experiment) -> dict[str, list[Any]]:
    """Return [before, after] of every field in which two configurations differ, by dotted path."""
    return changes(*(flat(config.model_dump(mode="json")) for config in (before, after)))


def change_lines(changed: Mapping[str, list[Any]]) -> list[str]:
    """Return each change as text, with shortened digests."""
    return [f"{name}: {value_text(before)} -> {value_text(after)}" for name, (before, after) in changed.items()]


def value_text(value: Any) -> str:
    """Return a value as text. A digest is shortened."""
    if value is None:
        return "none"
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else str(value)


def forked_from(origin: Origin, name: str) -> str:
    """Return the origin of a fork as text. `name` is the origin's folder name."""
    return f"{name} after {origin.iteration} iterations, fingerprint {origin.fingerprint[:12]}..."


def origin_lines(origin: Origin) -> list[str]:
    """Return the origin of a fork and its changed fields as lines of text."""
    return [f"forked from {forked_from(origin, origin.run)}", *(f"  {line}" for line in change_lines(origin.changed))]
