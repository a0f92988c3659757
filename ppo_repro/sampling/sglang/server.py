"""Start and end the servers of a run, and read their logs for the reason of a server's death."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.base.interrupts import ends_with_parent
from ppo_repro.base.output import say
from ppo_repro.sampling.sglang.client import Call

LAST_LINES = 20  # so many lines of a dead server's log are shown
# The system gives higher ports to programs that connect, so such a program could take a port before the server does.
# SGLang takes further ports up to 1,000 above its own.
PORTS = range(20_000, 31_000)
POLL_SECONDS = 0.25
DYING_SECONDS = 5.0  # time for a process to end after its connection broke

Waiting = Callable[[int], None]  # seconds waited so far


@dataclass(frozen=True)
class Server:
    """One SGLang server: its address, process and log."""

    url: str
    process: subprocess.Popen[bytes] | None = None  # leader of a process group; None for a server given by URL
    log: Path = Path()
    begin: int = 0  # byte of the log at which this server's output begins, after earlier starts of the run


def free_port() -> int:
    """Return a free loopback port of PORTS."""
    while True:
        port = PORTS[secrets.randbelow(len(PORTS))]
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def start(command: Sequence[str], environment: Mapping[str, str], log: Path, port: int) -> Server:
    """Start a server that the system kills when the run ends, together with SGLang's other processes.

    `environment` has all environment variables. Raises UserError if the command cannot be run.
    """
    with log.open("ab") as output:
        begin = output.tell()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C goes to the run alone, which ends its servers
                preexec_fn=ends_with_parent(),
            )
        except OSError as error:
            raise UserError(f"{command[0]}: cannot be started ({error})") from error
    return Server(f"http://127.0.0.1:{port}", process, log, begin)


def end(server: Server) -> None:
    """Kill a server that the run started, with all processes of its group; servers save nothing."""
    if server.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def wait_until_ready(server: Server, timeout_s: int, waiting: Waiting) -> None:
    """Wait until a server is healthy. Raises UserError if the server ends or takes longer than `timeout_s` seconds."""
    process, started, reported = server.process, time.monotonic(), 0
    assert process is not None, "only servers that the run started are waited for"
    while not _is_healthy(server.url):
        waited = time.monotonic() - started
        if process.poll() is not None:
            raise UserError(f"{death(server)}; it did not start")
        if any("address already in use" in line for line in _last_lines(server)):  # SGLang goes on running then
            raise UserError(f"{server.url}: another program took this port; start the run again")
        if waited > timeout_s:
            raise UserError(
                f"SGLang did not start within rollout.engine.timeout_s = {timeout_s}: see {server.log}, "
                "or allow more time"
            )
        if int(waited) > reported:
            reported = int(waited)
            waiting(reported)
        time.sleep(POLL_SECONDS)


def _is_healthy(url: str) -> bool:
    try:
        Call(url, "/health", 5).json()  # a healthy server needs a second for this, because it generates a token
    except UserError:
        return False
    return True


def death(server: Server) -> str | None:
    """Return a sentence about the death of a server that the run started, and print the last lines of its log.

    Returns None if the user started the server, or if the server still runs.
    """
    if server.process is None:
        return None
    try:
        code = server.process.wait(DYING_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    lines = _last_lines(server)
    say(f"the last lines of {server.log}:")
    for line in lines:
        say(f"    {line}")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    reason = next((line for line in reversed(lines) if "Error" in line or "error" in line), "")
    return f"SGLang ended with {how}{f' ({reason.strip()[:200]})' if reason else ''}, log {server.log}"


def _last_lines(server: Server) -> list[str]:
    with server.log.open("rb") as file:
        file.seek(max(server.begin, os.fstat(file.fileno()).st_size - 20_000))
        return file.read().decode("utf-8", "replace").splitlines()[-LAST_LINES:]
