"""Servers that the run starts: a free port, a process group that ends with the run, a log, and how they ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.errors import UserError
from ppo_repro.output import say
from ppo_repro.rollout.sglang import guard
from ppo_repro.rollout.sglang.client import Call, ServerGone, ServerSilent

LAST_LINES = 20  # of the log of a server that died
POLL_SECONDS = 0.25
END_SECONDS = 10.0

Waiting = Callable[[int], None]  # seconds waited so far


@dataclass(frozen=True)
class Process:
    """A server with the guard around it."""

    guard: subprocess.Popen[bytes]
    group: int  # process group of the server
    log: Path
    reserved: socket.socket  # reserves its port


def reserve_port() -> socket.socket:
    """Bind a free loopback port, so that no other program gets it, while a server can still listen on it.

    SGLang needs half a minute until it listens. Linux lets two sockets bind one address if both set SO_REUSEADDR.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def start(command: Sequence[str], environment: Mapping[str, str], log: Path, reserved: socket.socket) -> Process:
    """Start a server; its output is appended to `log`. UserError where the command cannot be run."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C goes to the run alone, which then ends its servers
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        end_of_log = _last_lines(log)
        end(Process(process, 0, log, reserved))
        raise UserError(f"{command[0]}: cannot be started ({end_of_log[-1] if end_of_log else 'no reason given'})")
    return Process(process, int(line), log, reserved)


def end(process: Process) -> None:
    """Kill a server with everything it started, and wait until it is gone; it may be gone already."""
    for pipe in (process.guard.stdin, process.guard.stdout):
        if pipe is not None:
            pipe.close()  # once its stdin is closed, the guard kills the server
    try:
        process.guard.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.guard.kill()
        process.guard.wait()
    if process.group:
        guard.kill_group(process.group)  # needed only if the guard was killed
    process.reserved.close()


def kill_now(process: Process) -> None:
    """Kill a server without waiting until it is gone."""
    process.guard.kill()
    if process.group:
        guard.kill_group(process.group)


def wait_until_ready(url: str, process: Process, timeout_s: int, waiting: Waiting) -> None:
    """Wait until the server is healthy; UserError where it ends before or takes too long."""
    started, reported = time.monotonic(), 0
    while not _is_healthy(url):
        waited = time.monotonic() - started
        if process.guard.poll() is not None:
            raise UserError(f"{death(process)}; it did not start")
        if any("address already in use" in line for line in _last_lines(process.log)):  # SGLang does not end then
            raise UserError(f"{url}: another program took this port; start the run again")
        if waited > timeout_s:
            raise UserError(
                f"SGLang did not start within rollout.engine.timeout_s = {timeout_s}: see {process.log}, "
                "or allow more time"
            )
        if int(waited) > reported:
            reported = int(waited)
            waiting(reported)
        time.sleep(POLL_SECONDS)


def _is_healthy(url: str) -> bool:
    try:
        # a healthy server needs a second for this, because it generates a token
        return Call(url, "GET", "/health", None, timeout=5).reply()[0] == 200
    except (ServerGone, ServerSilent):
        return False


def death(process: Process) -> str:
    """How a server ended, in one sentence; prints the last lines of its log."""
    code = process.guard.wait(END_SECONDS)
    lines = _last_lines(process.log)
    say(f"the last lines of {process.log}:")
    for line in lines:
        say(f"    {line}")
    how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
    reason = next((line for line in reversed(lines) if "Error" in line or "error" in line), "")
    return f"SGLang ended with {how}{f' ({reason.strip()[:200]})' if reason else ''}, log {process.log}"


def _last_lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
        return file.read().decode("utf-8", "replace").splitlines()[-LAST_LINES:]
