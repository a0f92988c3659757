"""Call the user's functions in a child process. An error names file, line and prompt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ppo_repro.base.errors import FunctionFailed, UserError
from ppo_repro.base.output import shown
from ppo_repro.config.tasks import CalledReward
from ppo_repro.user.file import Named, file_and_name
from ppo_repro.user.messages import CallFunction, LoadFile, encoded, read_reply

CALL_SECONDS = 300.0  # of wall time for one prompt; a function that needs more most likely never ends
_SECONDS_PER_TRANSCRIPT = 30.0  # in a call for all responses
LATE = "gave no answer"
ENDING_SECONDS = 5.0  # for a child to end after it has closed its pipe
_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from ppo_repro.user.child import main; main()"


class UserProcess:
    """Child process of a run. The first loaded file starts the process, and the end of this object ends it."""

    def __init__(self) -> None:
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None

    def ask(self, request: LoadFile | CallFunction, seconds: float, lost: Callable[[int, str], str]) -> list[Any]:
        """Send a request and return the values of its replies. Raises UserError for the first error.

        Args:
            seconds: limit of the wall time for each reply.
            lost: makes the error message from row and cause if the child ends or does not reply.
        """
        if self._child is None:
            self._child = _start()
            weakref.finalize(self, _stop, *self._child)
        child, connection = self._child
        values: list[Any] = []
        try:
            connection.send_bytes(encoded(request))
            for _ in range(len(request.rows) if isinstance(request, CallFunction) else 1):
                if not connection.poll(seconds):
                    raise TimeoutError
                reply = read_reply(connection.recv_bytes())
                if reply.error is not None:
                    raise _failed(request, reply.error)
                values.append(reply.value)
        except UserError:
            raise
        except (EOFError, OSError) as error:
            late = f"{LATE} within {seconds:g} s; make it end"
            how = late if isinstance(error, TimeoutError) else _how_ended(child)
            _stop(child, connection)  # no new child is started
            raise _failed(request, lost(len(values), how)) from error
        except BaseException:  # Ctrl-C: nobody reads the remaining replies
            _stop(child, connection)
            raise
        return values

    @property
    def is_alive(self) -> bool:
        """Return whether the child was started and has not ended."""
        return self._child is not None and self._child[0].poll() is None

    def end(self) -> None:
        """End the process now, with all processes that it started. No new process is started."""
        if self._child is not None:
            _stop(*self._child)


def _failed(request: LoadFile | CallFunction, message: str) -> UserError:
    """Return the error of a file that does not load, or of a function that failed on a row."""
    return FunctionFailed(message, request.field) if isinstance(request, CallFunction) else UserError(message)


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    # With a fixed hash seed a set of texts has one order in every process. In a session of its own the child gets no
    # Ctrl-C from the terminal.
    child = subprocess.Popen(
        [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(_search_path())],
        stdin=subprocess.DEVNULL,
        stdout=2,  # the output of the user's code goes to stderr
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        start_new_session=True,
    )
    theirs.close()
    return child, ours


def _search_path() -> list[str]:
    """Return the folders in which the child looks for modules, without the current folder."""
    home, asked = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [path for path in sys.path if path and (path in (home, *asked) or path != os.getcwd())]
    return folders if home in folders else [*folders, home]


def _stop(child: subprocess.Popen[bytes], connection: Connection) -> None:
    """Kill a child's process group, which includes a server that the user's code started. It may outlive the child."""
    if connection.closed:  # stopped before; the group's number may belong to another process now
        return
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    connection.close()


def _how_ended(child: subprocess.Popen[bytes]) -> str:
    try:
        code = child.wait(timeout=ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed the connection to the run"
    if code >= 0:
        return f"ended its process (exit status {code}); let it return or raise"
    reason = "as the system does when memory runs out" if -code == signal.SIGKILL else "a crash in C code most likely"
    return f"ended its process ({signal.Signals(-code).name}, {reason})"


@dataclass(frozen=True)
class UserFunction(Named):
    """Function of a user's file, which the child process has loaded."""

    process: UserProcess
    call: str  # convention by which the child calls the function
    options: Mapping[str, Any]
    seconds: float = CALL_SECONDS  # of wall time for one row
    longer: str = ""  # further advice about a call that takes too long

    def __call__(self, rows: Sequence[Mapping[str, Any]], seed: int = 0) -> list[Any]:
        """Call the function for each row of arguments; functions of the convention `scores` get all rows at once.

        `seed` seeds the global generators before each call. Raises UserError, with field, file, line and prompt, if the
        function raises, returns a wrong value, takes too long, or ends its process.
        """
        seconds, sent = self.seconds, list(rows)
        if self.call == "scores":
            seconds, sent = max(seconds, _SECONDS_PER_TRANSCRIPT * len(rows)), [{"transcripts": sent}]

        def lost(row: int, how: str) -> str:
            prompt = f"; prompt key '{shown(sent[row]['key'])}'" if "key" in sent[row] else ""
            return f"{self.where}: {self.name} {how}{self.longer if how.startswith(LATE) else ''}{prompt}"

        request = CallFunction(self.field, str(self.file), self.name, self.line, self.call, self.options, seed, sent)
        values = self.process.ask(request, seconds, lost)
        return list(values[0]) if self.call == "scores" else values


def load(
    process: UserProcess, field: str, file: Path, calls: Mapping[str, str], options: Mapping[str, Any] | None = None
) -> dict[str, UserFunction]:
    """Execute a file in the child and return its functions with names in `calls`, which gives their conventions.

    Raises UserError if the file fails to load.
    """
    request = LoadFile(field, str(file), calls, os.getcwd())
    (lines,) = process.ask(request, CALL_SECONDS, lambda row, how: f"{field}: {file} fails to load (it {how})")
    return {n: UserFunction(field, file, n, line, process, calls[n], options or {}) for n, line in lines.items()}


def load_from_package(
    process: UserProcess, field: str, code: str, module: Path, names: Iterable[str], seconds: float, longer: str = ""
) -> dict[str, UserFunction]:
    """Load functions of a module of this package that runs code of the user. Messages name this `code`."""
    functions = load(process, field, module, dict.fromkeys(names, "unchecked"))
    return {
        name: replace(function, file=Path(code), line="", seconds=seconds, longer=longer)
        for name, function in functions.items()
    }


def load_reward(process: UserProcess, field: str, term: CalledReward) -> UserFunction:
    """Load the function of a reward term. Raises UserError with its fault."""
    file, name = file_and_name(field, term.path)
    functions = load(process, field, file, {name: term.kind}, term.model_dump(mode="json"))
    if name not in functions:
        raise UserError(f"{field} = {term.path!r}: {file} has no function {name}")
    return functions[name]


def check_repeats(function: UserFunction, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError, with the prompt and the last text, if two calls give different results.

    The second call has the opposite order and another seed of the global generators. So results differ if they depend
    on earlier calls or on an unseeded draw.
    """
    _require_equal(function, rows, function(rows, 1), function(rows[::-1], 2)[::-1])


def _require_equal(
    function: UserFunction, rows: Sequence[Mapping[str, Any]], first: Sequence[Any], second: Sequence[Any]
) -> None:
    for row, earlier, later in zip(rows, first, second, strict=True):
        if earlier != later:
            raise UserError(
                f"{function.where}: {function.name} returned {shown(repr(earlier))} and then {shown(repr(later))} for "
                f"the same input (prompt key '{shown(row['key'])}', text '{shown(row['turns'][-1])}'); it must follow "
                "from its input alone"
            )


def check_alone(function: UserFunction, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError if a function of TRL scores responses otherwise together than alone.

    Such a function ranks or normalises the responses of a call, but a run gives it one response at a time. A function
    that fails for several responses passes this check.
    """
    alone = function(rows)
    try:
        whole = replace(function, call="trl_together", seconds=len(rows) * function.seconds)
        (together,) = whole([{"rows": list(rows)}])
    except FunctionFailed:
        if not function.process.is_alive:
            raise
        return
    if together != alone:
        _require_equal(function, rows, alone, function(rows))
    for row, single, beside in zip(rows, alone, together, strict=True):
        if single != beside:
            raise UserError(
                f"{function.where}: {function.name} compares completions: '{shown(row['response'])}' gets "
                f"{single:g} alone and {beside:g} beside {len(rows) - 1} others, and a run gives it one completion at "
                "a time; let a score follow from its own completion, or score all responses at once in the score() of "
                "a task of kind python"
            )
