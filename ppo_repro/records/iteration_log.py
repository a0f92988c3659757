"""The recorded iterations of a run: one line of iterations.jsonl each, appended and never changed.

The manifest says how many lines, and how many bytes, belong to the run. What follows them was written by a process
that was killed; it is ignored and overwritten.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ppo_repro.errors import UserError
from ppo_repro.records import digests

FILE_NAME = "iterations.jsonl"
DAMAGED = "the file was changed or damaged"
_CONFIG = ConfigDict(extra="forbid", strict=True)


# slots: readers keep one entry per table and iteration in memory, and a pydantic model takes 4 times the space
@dataclass(frozen=True, slots=True, config=_CONFIG)
class TableEntry:
    """One recorded file. Entries are equal where the results are: the bytes of a file depend on timings too."""

    rows: Annotated[int, Field(ge=0)]
    digest: str  # of the values
    file_digest: str | None = field(default=None, compare=False)  # of the bytes; None before manifest version 3


@dataclass(frozen=True, slots=True, config=_CONFIG)
class IterationEntry:
    """One recorded iteration; `chain` follows from the iteration before and the digests of `tables`."""

    iteration: Annotated[int, Field(ge=0)]
    tables: dict[str, TableEntry]
    chain: str
    beside: dict[str, TableEntry] = field(default_factory=dict)  # side tables, which are in no chain
    # the first iteration of those whose tables are in the same files, one row group each; None: alone in its files
    first_in_file: int | None = field(default=None, compare=False)

    @property
    def row_group(self) -> int | None:
        """Which row group of its files the iteration is; None where it is all of them."""
        return None if self.first_in_file is None else self.iteration - self.first_in_file


_ENTRY = TypeAdapter(IterationEntry)


def next_link(previous: str, tables: dict[str, TableEntry]) -> str:
    """The chain link of an iteration that follows the link `previous`."""
    return digests.chain(previous, {name: entry.digest for name, entry in tables.items()})


def to_line(entry: IterationEntry) -> bytes:
    """The line of an iteration: JSON whose last field is the SHA-256 of the JSON without that field."""
    # without `beside` where there is nothing beside, as in runs of earlier versions
    return _signed(_ENTRY.dump_json(entry, exclude_defaults=True)) + b"\n"


def _signed(content: bytes) -> bytes:
    return content[:-1] + f',"sha256":"{hashlib.sha256(content).hexdigest()}"}}'.encode()


def from_line(line: bytes) -> IterationEntry:
    """The iteration of a line without its line break; ValueError unless `to_line` wrote it."""
    content = line.rpartition(b',"sha256":')[0] + b"}"
    if _signed(content) != line:
        raise ValueError("does not have the SHA-256 at its end")
    return _ENTRY.validate_json(content)


def extended(digest: str, line: bytes) -> str:
    """The digest of the log with one more line: SHA-256 over the digest before and the line; empty for no line."""
    return hashlib.sha256(digest.encode() + line).hexdigest()


def append(run_dir: Path, size: int, digest: str, entries: Sequence[IterationEntry]) -> tuple[int, str]:
    """Write iterations after the first `size` bytes and flush them; returns size and digest, for the manifest.

    UserError where writing fails.
    """
    lines = [to_line(entry) for entry in entries]
    cut(run_dir, size, b"".join(lines))
    for line in lines:
        size, digest = size + len(line), extended(digest, line)
    return size, digest


def cut(run_dir: Path, size: int, data: bytes = b"") -> None:
    """Cut the log to its first `size` bytes, append `data` and flush it to the disk; UserError where that fails.

    The first `size` bytes are safe at any moment. The appended ones count only once the manifest says so.
    """
    path = run_dir / FILE_NAME
    try:
        with path.open("r+b") as file:
            file.truncate(size)
            file.seek(size)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); make room there") from error


def read(run_dir: Path, count: int, size: int, digest: str | None) -> tuple[IterationEntry, ...]:
    """The `count` iterations in the first `size` bytes; UserError where they are missing or damaged.

    `digest`: of those bytes, None where an earlier version noted none.
    """
    path = run_dir / FILE_NAME
    try:
        with path.open("rb") as file:
            content = file.read(size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore it") from error
    # the last piece is what follows the last line break: nothing where all lines are complete
    *lines, rest = content.split(b"\n")
    if len(content) != size or rest or len(lines) != count:
        # only whole lines, and no more than lines: nothing has said yet that they are iterations
        found_counts = f"{len(lines)} whole {'line' if len(lines) == 1 else 'lines'} in {len(content)} bytes"
        raise UserError(f"{path}: holds {found_counts}, the manifest says {count} in {size}; {DAMAGED}")
    entries = tuple(_entry(path, number, line) for number, line in enumerate(lines))
    found = ""
    for line in lines:
        found = extended(found, line + b"\n")
    if digest is not None and found != digest:
        raise UserError(f"{path}: has another digest than the manifest says; {DAMAGED}")
    return entries


def _entry(path: Path, number: int, line: bytes) -> IterationEntry:
    try:
        return from_line(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise UserError(f"{path}: line {number + 1}: {where}: {first['msg']}; {DAMAGED}") from error
    except ValueError as error:
        raise UserError(f"{path}: line {number + 1}: {error}; {DAMAGED}") from error
