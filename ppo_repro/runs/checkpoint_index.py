"""checkpoint.json: the digests of the other files of a checkpoint, and its own. Needs no tensor.

Its text is a function of its content, so that any other byte is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ppo_repro.errors import UserError
from ppo_repro.files import file_digest
from ppo_repro.mistakes import mistakes

FORMAT = 4
INDEX_NAME = "checkpoint.json"
POLICY, VALUE_MODEL = "policy.safetensors", "value_model.safetensors"
POLICY_OPTIMIZER, VALUE_OPTIMIZER = "policy_optimizer.safetensors", "value_optimizer.safetensors"
VERSIONS = "older_policies.safetensors"  # only where the sampler is behind
_FILES = {POLICY, VALUE_MODEL, POLICY_OPTIMIZER, VALUE_OPTIMIZER}
DAMAGED = "the checkpoint was changed or damaged"


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class OptimizerEntry(_Entry):
    steps: dict[str, int]


class CoefficientsEntry(_Entry):
    """Numbers as float.hex."""

    kl_coef: str
    clip_range: str
    penalty_coef: str
    return_count: int
    return_mean: str
    return_squares: str


class Index(_Entry):
    """Content of checkpoint.json, its own digest left out."""

    format: int
    ppo_repro: str
    law: str
    iteration: int = Field(ge=1)
    chain: str
    task: str
    reference: dict[str, str]
    policy_optimizer: OptimizerEntry
    value_optimizer: OptimizerEntry
    coefficients: CoefficientsEntry
    files: dict[str, str]


@dataclass(frozen=True)
class Outline:
    """A checkpoint without its tensors."""

    iteration: int
    chain: str
    reference: Mapping[str, str]


def check(folder: Path) -> Outline:
    """Compare every file of a checkpoint, of any version of ppo_repro, with its digest; UserError names a damaged one.

    No tensor is loaded.
    """
    index = read_index(folder)
    for name, digest in index.files.items():
        check_file(folder / name, digest)
    return Outline(index.iteration, index.chain, index.reference)


def read_index(folder: Path) -> Index:
    """The index of a checkpoint that holds the files of the index and no others."""
    index = _parsed(folder / INDEX_NAME)
    if set(index.files) - {VERSIONS} != _FILES:
        raise UserError(f"{folder / INDEX_NAME}: lists {', '.join(sorted(index.files))}; {DAMAGED}")
    for path in sorted(folder.rglob("*")):
        if path.relative_to(folder).as_posix() not in {*index.files, INDEX_NAME}:
            raise UserError(f"{path}: is no file of a checkpoint; move it away")
    return index


def verified_bytes(path: Path, digest: str) -> bytes:
    """The content of a file with this SHA-256; UserError where it is missing, unreadable or has another one."""
    content = _read(path)
    _require_digest(path, hashlib.sha256(content).hexdigest(), digest)
    return content


def check_file(path: Path, digest: str) -> None:
    """`verified_bytes` without the content, which is never in memory as a whole."""
    try:
        found = file_digest(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    _require_digest(path, found, digest)


def _require_digest(path: Path, found: str, digest: str) -> None:
    if found != digest:
        raise UserError(f"{path}: has another SHA-256 than when it was written; {DAMAGED}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read ({error.strerror}); {DAMAGED}")


def sealed(tree: dict[str, Any]) -> str:
    """The text of checkpoint.json: a function of its content, with the SHA-256 of the text without it."""

    def text(content: dict[str, Any]) -> str:
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    return text({**tree, "sha256": hashlib.sha256(text(tree).encode()).hexdigest()})


def _parsed(path: Path) -> Index:
    content = _read(path)
    try:
        tree = json.loads(content)
        is_index = isinstance(tree, dict) and tree.pop("sha256", None) is not None
        is_whole = is_index and sealed(tree).encode() == content
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not valid JSON; {DAMAGED}") from error
    if not is_index:
        raise UserError(f"{path}: is not the index of a checkpoint; {DAMAGED}")
    if not is_whole:
        raise UserError(f"{path}: does not match its own SHA-256; {DAMAGED}")
    if tree.get("format") != FORMAT:
        found, version = tree.get("format"), tree.get("ppo_repro")
        raise UserError(
            f"{path}: format = {found!r} of ppo_repro {version}, this one has {FORMAT}; use the version that wrote it"
        )
    try:
        return Index.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: content: {mistakes(Index, error)[0]}; {DAMAGED}") from error
