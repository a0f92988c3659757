"""Find the files that a configuration names; a run copies them into its folder, and digests them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ppo_repro.base.beside import modules_beside
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, file_digest
from ppo_repro.config.section import Experiment, short_digest, sorted_json
from ppo_repro.config.tree import path_fields

INPUTS_FOLDER = "inputs"  # of a run folder
LARGEST_COPY = 64_000_000  # bytes


@dataclass(frozen=True)
class Inputs:
    """The files that a configuration names, and their digests."""

    config: Experiment  # as config.yaml in the run folder has it
    copies: Mapping[str, Path]  # by name below the run folder
    digests: Mapping[str, str]  # SHA-256 of copies by that name, and of files that stay by FIELD/FILE


def gather(config: Experiment) -> Inputs:
    """Compute the digest of every input. Raises UserError for an unreadable file; other code refuses missing files."""
    tree, copies = config.model_dump(mode="json"), _Copies()
    staying: dict[str, str] = {}
    for field, section, name in path_fields(tree):
        file, function = file_of(section[name])
        if not file.is_file():
            staying |= {f"{field}/{path.name}": digest_of(path) for path in decisive(file)}
        elif file.suffix == ".py":
            section[name] = copies.add_code(file) + function
        elif file.stat().st_size <= LARGEST_COPY:
            section[name] = copies.add_data(file)
        else:
            staying[f"{field}/{file.name}"] = digest_of(file)
    return Inputs(type(config).model_validate(tree), copies.paths, {**copies.digests, **staying})


def file_of(text: str) -> tuple[Path, str]:
    """Split the text of a path into the path and `:NAME`, which is "" unless the text is `FILE.py:NAME`."""
    file, colon, name = text.rpartition(":")
    return (Path(file), f":{name}") if colon and file.endswith(".py") else (Path(text), "")


class _Copies:
    """Files to copy: paths and SHA-256 by name relative to the run folder."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}
        self.digests: dict[str, str] = {}
        self._code_folders: dict[Path, str] = {}

    def add_code(self, file: Path) -> str:
        """Add a Python file and the modules beside it, and return its name.

        Each source folder has its own target folder.
        """
        folders = self._code_folders
        new = f"{INPUTS_FOLDER}/{len(folders) + 1}" if folders else INPUTS_FOLDER
        place = folders.setdefault(file.parent, new)
        for path in (file, *modules_beside(file)):
            copy = f"{place}/{path.relative_to(file.parent).as_posix()}"
            self.paths[copy], self.digests[copy] = path, digest_of(path)
        return f"{place}/{file.name}"

    def add_data(self, file: Path) -> str:
        """Add a data file, and return its name, which gets a number if a different file has the same name."""
        digest, copy, number = digest_of(file), f"{INPUTS_FOLDER}/{file.name}", 1
        while self.digests.get(copy, digest) != digest:
            number += 1
            copy = f"{INPUTS_FOLDER}/{file.stem}-{number}{file.suffix}"
        self.paths[copy], self.digests[copy] = file, digest
        return copy


def decisive(folder: Path) -> list[Path]:
    """Return the files that identify a folder: the manifest of a recorded run, or all files of a model."""
    recorded = folder / MANIFEST
    if recorded.is_file() or not folder.is_dir():  # loading refuses what is no folder
        return [recorded] if recorded.is_file() else []
    return sorted(p for p in folder.iterdir() if p.suffix in {".json", ".safetensors", ".jinja", ".model", ".txt"})


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises UserError if the file cannot be read or changes meanwhile."""
    try:
        about = path.stat()
        return _digest(path.resolve(), about.st_mtime_ns, about.st_size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


@cache
def _digest(path: Path, modified: int, size: int) -> str:
    return file_digest(path)


def run_digest(inputs: Inputs, origin: str = "") -> str:
    """Return 12 hex digits of a digest of configuration, inputs and origin.

    `origin` is the fingerprint from which a fork continues. The bytes and names of inputs count, their folders do not.
    Without inputs and origin, the result is the digest of the configuration.
    """
    tree = inputs.config.canonical()
    for field, section, name in path_fields(tree):
        if any(known.startswith(f"{field}/") for known in inputs.digests):
            section[name] = field
    if inputs.digests:
        tree["inputs"] = dict(inputs.digests)
    if origin:
        tree["origin"] = origin
    return short_digest(sorted_json(tree))


def run_folder(config: Experiment, out: Path, origin: str = "") -> Path:
    """Return the folder of a run: OUT/<experiment>/seed<seed>-<digest of configuration and inputs>."""
    return out / config.experiment / f"seed{config.seed}-{run_digest(gather(config), origin)}"
