"""A process that runs one server and ends it with the run: `python guard.py COMMAND...`.

Its stdin is a pipe that nobody writes to; the kernel closes it when the run ends, however it ends. Then the guard kills
every process of the server: a server has nothing to save, and SGLang ends its processes the same way. The guard also
ends when the server does. The first line on stdout is the server's process group. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

PR_SET_CHILD_SUBREAPER = 36
REAP_SECONDS = 5.0


def kill_group(group: int) -> None:
    """Send SIGKILL to every process of a group; it may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _reap() -> None:
    """Wait for all children, including adopted ones, for REAP_SECONDS at most."""
    until = time.monotonic() + REAP_SECONDS
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
        except ChildProcessError:
            return


def _kill_when_run_ends(group: int) -> None:
    while os.read(0, 4096):  # not sys.stdin, because this thread would hold its lock when the interpreter ends
        pass
    kill_group(group)


def _ignore(number: int, frame: object) -> None:
    """The run gets these signals too, and ends the server."""


def main(command: Sequence[str]) -> int:
    """Run the command until it or the run ends; returns its exit code, or 128 + signal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignore)  # the server would inherit SIG_IGN
    if sys.platform == "linux":  # adopt the server's orphans, to see when a killed process group is gone
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # a short prefix, because the path of a socket is limited to 107 characters
    with tempfile.TemporaryDirectory(prefix="ppo-sglang-", ignore_cleanup_errors=True) as folder:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, env={**os.environ, "TMPDIR": folder}, process_group=0
        )
        os.write(1, f"{server.pid}\n".encode())
        threading.Thread(target=_kill_when_run_ends, args=(server.pid,), daemon=True).start()
        code = server.wait()
        kill_group(server.pid)  # what the first process of the server left behind
        _reap()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
