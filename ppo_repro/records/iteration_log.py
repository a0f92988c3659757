"""The recorded iterations of a run: one line of iterations.jsonl each, appended and never changed.

The manifest says how many lines, and how many bytes, belong to the run. What follows them was written by a process
that was killed; it is ignored and overwritten.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter
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
    file_digest: str = field(compare=False)  # of the bytes


@dataclass(frozen=True, slots=True, config=_CONFIG)
class IterationEntry:
    """One recorded iteration; `chain` follows from the iteration before and the digests of `tables`."""

    iteration: Annotated[int, Field(ge=0)]
    tables: dict[str, TableEntry]
    chain: str
    beside: dict[str, TableEntry] = field(default_factory=dict)  # side tables, which are in no chain


_ENTRY = TypeAdapter(IterationEntry)


def next_link(previous: str, tables: dict[str, TableEntry]) -> str:
    """The chain link of an iteration that follows the link `previous`."""
    return digests.chain(previous, {name: entry.digest for name, entry in tables.items()})


def to_line(entry: IterationEntry) -> bytes:
    """The line of an iteration: JSON whose last field is the SHA-256 of the JSON without that field."""
    content = _ENTRY.dump_json(entry, exclude_defaults=True)
    return content[:-1] + f',"sha256":"{hashlib.sha256(content).hexdigest()}"}}\n'.encode()


def extended(digest: str, line: bytes) -> str:
    """The digest of the log with one more line: SHA-256 over the digest before and the line; empty for no line."""
    return hashlib.sha256(digest.encode() + line).hexdigest()


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


def read(run_dir: Path, count: int, size: int, digest: str) -> tuple[IterationEntry, ...]:
    """The `count` iterations in the first `size` bytes, whose digest is `digest`; UserError where they are damaged."""
    path = run_dir / FILE_NAME
    try:
        with path.open("rb") as file:
            lines = file.read(size).splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore it") from error
    found, entries = "", []
    for number, line in enumerate(lines, 1):
        found = extended(found, line)
        try:
            entries.append(_ENTRY.validate_json(line.rpartition(b',"sha256":')[0] + b"}"))
        except ValueError as error:
            raise UserError(f"{path}: line {number}: {str(error).splitlines()[0]}; {DAMAGED}") from error
    if found != digest or len(entries) != count:
        raise UserError(f"{path}: is not the {count} lines in {size} bytes that the manifest counts; {DAMAGED}")
    return tuple(entries)
