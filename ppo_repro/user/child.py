"""Main program of the child process in which a user's functions run.

The process starts fast: it imports torch and NumPy only if a file of the user imports them.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import random
import resource
import signal
import sys
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.base.interrupts import ends_with_parent
from ppo_repro.base.output import shown, visible
from ppo_repro.user.conventions import CALLS, Function, check_signature
from ppo_repro.user.file import RefusedError, begin_of, described, execute, line_of, not_loaded, uncopied
from ppo_repro.user.messages import CallFunction, CallRow, LoadFile, Reply, encoded, read_request

Loaded = dict[tuple[str, str], Function]  # by field of the configuration and name


def _awaited(function: Function) -> Function:
    """Return the function. One event loop runs the results of an `async def`."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        value = function(*arguments, **named)
        return _loop().run(_result(value)) if inspect.isawaitable(value) else value

    return call


async def _result(value: Awaitable[Any]) -> Any:
    return await value


@functools.cache
def _loop() -> Any:
    import asyncio  # imported here, because few functions need it and its import takes time

    return asyncio.Runner()


def _load(functions: Loaded, request: LoadFile) -> dict[str, str]:
    """Execute the file and add its functions in `calls` to `functions`; return `:LINE` of each, "" if it is unknown."""
    os.chdir(request.folder)  # another file may have changed the current folder
    field, file, before = request.field, Path(request.file), set(sys.modules)
    module, lines = execute(file), {}
    for other in uncopied(before):
        print(f"warning: {field}: imports {other}, which is not copied: a rerun elsewhere lacks it", file=sys.stderr)
    for name, call in request.calls.items():
        function = getattr(module, name, None)
        if function is None:
            continue
        check_signature(name, function, call)
        lines[name] = begin_of(function, file)
        functions[field, name] = _awaited(function)
    return lines


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, and of NumPy and torch if the user's files have imported them."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _loaded(functions: Loaded, request: LoadFile) -> Reply:
    try:
        return Reply(_load(functions, request))
    except RefusedError as error:
        return Reply(error=f"{request.field}: {request.file}: {error}")
    except BaseException as error:  # SystemExit of the user's code included
        return Reply(error=not_loaded(request.field, request.file, error))


def _called(functions: Loaded, request: CallFunction, row: CallRow) -> Reply:
    prompt = f"; prompt key '{shown(row['key'])}'" if "key" in row else ""
    field, file, name, line = request.field, request.file, request.name, request.line
    try:
        seed_generators(request.seed)
        return Reply(CALLS[request.call].call(functions[field, name], row, request.options))
    except UserError as error:  # raised by a file of this package
        return Reply(error=str(error))
    except RefusedError as error:
        return Reply(error=f"{field}: {file}{line}: {name} {error}{prompt}")
    except BaseException as error:  # SystemExit and KeyboardInterrupt of the user's code included
        raised = f"{described(error, file)}{_advice(error, request)}"
        return Reply(error=f"{field}: {file}{line_of(error, file) or line}: {name} raised {raised}{prompt}")


def _advice(error: BaseException, request: CallFunction) -> str:
    """Return what completions are, after an error that a function of TRL raises if it expects the other kind."""
    if not request.call.startswith("trl") or not isinstance(error, TypeError | AttributeError):
        return ""
    kinds = "texts", "lists of chat messages"
    is_chat = request.options["conversational"]
    return f"; completions are {kinds[is_chat]}, with conversational: {str(not is_chat).lower()} {kinds[not is_chat]}"


def _replies(functions: Loaded, request: LoadFile | CallFunction) -> Iterable[Reply]:
    """Yield the replies to a request, up to the first error."""
    if isinstance(request, LoadFile):
        yield _loaded(functions, request)
        return
    for row in request.rows:
        reply = _called(functions, request, row)
        yield reply
        if reply.error is not None:
            return


def _ready() -> None:
    """Prepare this process to end with the run, to end first if memory runs out, and to ignore Ctrl-C and SIGTERM."""
    for number_ in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number_, lambda *_: None)
    ends_with_parent()()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        resource.setrlimit(resource.RLIMIT_DATA, (available, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class _Visible(io.TextIOWrapper):
    """Output stream of the user's code, with control characters escaped: a response cannot control the terminal."""

    def write(self, text: str) -> int:
        super().write(visible(text))
        return len(text)


def main() -> None:
    """Answer requests until the run closes the connection."""
    connection = Connection(int(sys.argv.pop()))
    for name in ("stdout", "stderr"):
        raw = io.FileIO(getattr(sys, name).fileno(), "w", closefd=False)
        setattr(sys, name, _Visible(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True))
    os.set_inheritable(connection.fileno(), False)
    _ready()
    functions: Loaded = {}
    with suppress(EOFError):
        while True:
            for reply in _replies(functions, read_request(connection.recv_bytes())):
                for stream in (sys.stdout, sys.stderr):
                    with suppress(AttributeError, ValueError, OSError):
                        stream.flush()
                connection.send_bytes(encoded(reply))
