"""The files that a configuration names, and the name of its run, which follows from their bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ppo_repro.config.files import PYTHON, path_fields
from ppo_repro.config.section import Experiment, canonical_json, short_digest
from ppo_repro.errors import UserError
from ppo_repro.files import file_digest

FOLDER = "inputs"  # of a run folder
LARGEST_COPY = 64_000_000  # bytes


@dataclass(frozen=True)
class Inputs:
    """The files that a configuration names."""

    tree: Mapping[str, Any]  # the configuration as config.yaml in the run folder has it
    copies: Mapping[str, Path]  # by name below the run folder
    digests: Mapping[str, str]  # SHA-256 of copies by that name, and of files that stay by FIELD/FILE


def gather(config: Experiment) -> Inputs:
    """Read the digest of every input; UserError if a file cannot be read. What is not there is refused elsewhere."""
    tree, copies, digests = config.model_dump(mode="json"), dict[str, Path](), dict[str, str]()
    for field, section, name in path_fields(tree):
        if field == PYTHON:
            continue
        file, function = _parts(section[name])
        if file.is_file() and file.stat().st_size <= LARGEST_COPY:
            digest, copy = digest_of(file), f"{FOLDER}/{file.name}"
            number = 1
            while digests.get(copy, digest) != digest:  # another file of that name
                number += 1
                copy = f"{FOLDER}/{file.stem}-{number}{file.suffix}"
            copies[copy], digests[copy] = file, digest
            section[name] = copy + function
        else:
            for path in [file] if file.is_file() else _decisive(file):
                digests[f"{field}/{path.name}"] = digest_of(path)
    return Inputs(tree, copies, digests)


def _parts(value: str) -> tuple[Path, str]:
    """File and `:FUNCTION` of a path field."""
    file, colon, function = value.rpartition(":")
    return (Path(file), colon + function) if colon and file.endswith(".py") else (Path(value), "")


def _decisive(folder: Path) -> list[Path]:
    """The files that say what a folder is: the manifest of a recorded run, or all of a model that is loaded."""
    recorded = folder / "manifest.json"
    if recorded.is_file() or not folder.is_dir():  # loading refuses what is no folder
        return [recorded] if recorded.is_file() else []
    return sorted(p for p in folder.iterdir() if p.suffix in {".json", ".safetensors", ".jinja", ".model", ".txt"})


def digest_of(path: Path) -> str:
    """SHA-256 of a file, read once while it does not change; UserError if it cannot be read."""
    try:
        about = path.stat()
        return _digest(path.resolve(), about.st_mtime_ns, about.st_size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


@cache
def _digest(path: Path, modified: int, size: int) -> str:
    return file_digest(path)


def run_digest(inputs: Inputs, origin: str = "") -> str:
    """12 hex digits over configuration, inputs and origin, the fingerprint from which a fork goes on.

    Paths of inputs do not count, their bytes do. Without any it is the digest of the configuration.
    """
    if not inputs.digests and not origin:
        return short_digest(canonical_json(inputs.tree))
    tree = json.loads(canonical_json(inputs.tree))
    for field, section, name in path_fields(tree):
        if any(known.startswith(f"{field}/") for known in inputs.digests):
            section[name] = field
    tree["inputs"] = dict(inputs.digests)
    if origin:
        tree["origin"] = origin
    return short_digest(json.dumps(tree, sort_keys=True, separators=(",", ":")))


def run_folder(config: Experiment, out: Path, origin: str = "") -> Path:
    """OUT/<experiment>/seed<seed>-<digest of configuration and inputs>."""
    return out / config.experiment / f"seed{config.seed}-{run_digest(gather(config), origin)}"
