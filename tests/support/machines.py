"""Two machines: network namespaces with a cable between them, host names and temporary file systems of their own.

Nothing below /tmp is on both, so the second machine has none of the files of a test.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.interrupts import hearing_ctrl_c

NAMES = ("machine-a", "machine-b")
LINES = ("10.77.0.1", "10.77.0.2")
PORT = 29417


@dataclass(frozen=True)
class Machines:
    """The network namespaces of two machines, by their number."""

    spaces: tuple[str, str]

    def start(self, number: int, command: list[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on a machine; its output is in `log`."""
        apart = f"hostname {NAMES[number]}; {'mount -t tmpfs none /tmp; ' if number else ''}exec {shlex.join(command)}"
        inside = ["ip", "netns", "exec", self.spaces[number], "unshare", "--mount", "--uts", "sh", "-c", apart]
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.spaces[number], **environment}
        with log.open("w") as out, hearing_ctrl_c():
            return subprocess.Popen(inside, cwd="/", env={**os.environ, **variables}, stdout=out, stderr=out)

    def torchrun(
        self, folder: Path, each: int, *arguments: str | Path, module: str = "ppo_repro", **environment: str
    ) -> list[subprocess.Popen[bytes]]:
        """Start the program on both machines by hand, `each` processes on each, with logs in `folder`."""
        shared = ["-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={each}", f"--master-addr={LINES[0]}"]
        words = ["-m", module, *map(str, arguments)]
        return [
            self.start(
                number,
                [sys.executable, *shared, f"--master-port={PORT}", f"--node-rank={number}", *words],
                folder / f"{NAMES[number]}.log",
                **environment,
            )
            for number in range(2)
        ]

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Pull the cable while the block lasts."""
        cable = "-n", self.spaces[1], "link", "set", self.spaces[1]
        _ip(*cable, "down")
        try:
            yield
        finally:
            _ip(*cable, "up")


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Make two machines, which are gone after the block."""
    spaces = f"ppoa{os.getpid()}", f"ppob{os.getpid()}"
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("link", "add", spaces[0], "netns", spaces[0], "type", "veth", "peer", "name", spaces[1], "netns", spaces[1])
        for space, line in zip(spaces, LINES, strict=True):
            _ip("-n", space, "address", "add", f"{line}/24", "dev", space)
            for device in (space, "lo"):
                _ip("-n", space, "link", "set", device, "up")
        yield Machines(spaces)
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
