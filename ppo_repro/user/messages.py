"""Messages between a run and the child process of the user's functions: JSON objects on a connection."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CallRow = Mapping[str, Any]  # the arguments of one call


@dataclass(frozen=True)
class LoadFile:
    """A request to execute a file. The reply's value is `:LINE` of each of its functions in `calls`."""

    field: str  # of the configuration, which names the file
    file: str
    calls: Mapping[str, str]  # conventions of functions by name
    folder: str  # the current folder of the run


@dataclass(frozen=True)
class CallFunction:
    """A request to call a loaded function for each row. Each row has a reply, up to the first error."""

    field: str
    file: str
    name: str
    line: str  # `:LINE`, where the function begins
    call: str  # its convention
    options: Mapping[str, Any]
    seed: int  # of the global generators before each call
    rows: Sequence[CallRow]


@dataclass(frozen=True)
class Reply:
    """The result of a load or a call. `error` is one line for the user, None if it succeeded."""

    value: Any = None
    error: str | None = None


def encoded(message: LoadFile | CallFunction | Reply) -> bytes:
    """Return a message as bytes."""
    return json.dumps([type(message).__name__, vars(message)]).encode()


def read_request(data: bytes) -> LoadFile | CallFunction:
    """Return the request that was `encoded`."""
    kind, fields = json.loads(data)
    return LoadFile(**fields) if kind == LoadFile.__name__ else CallFunction(**fields)


def read_reply(data: bytes) -> Reply:
    """Return the reply that was `encoded`."""
    _, fields = json.loads(data)
    return Reply(**fields)
