"""A Ray cluster of two nodes on this machine, with one CPU each; one of them can be killed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.grids.slurm import descendants, free_ports, kill

START_SECONDS = 120.0
OFF = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_AUTH_MODE": "disabled",  # where ~/.ray has a token a head asks for it, and a second node sends none
}
# how soon a dead node is noticed; the usual half minute would be waited for
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(frozen=True)
class RayCluster:
    """Two nodes; the first is the head."""

    address: str
    nodes: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]

    def lose_the_second(self) -> None:
        """Kill all processes of the node, as a power cut does."""
        _kill(self.nodes[1])


def _kill(process: subprocess.Popen[bytes]) -> None:
    for pid in (process.pid, *descendants(process.pid)):
        kill(pid)
    process.wait()


def _start(log: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", *options]
    with log.open("ab") as stream:
        return subprocess.Popen(
            command, env={**os.environ, **OFF, **HEALTH}, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip


def _until_ready(log: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.2)


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """The cluster, which ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: it has sockets, whose paths may have 107 characters
    (port,) = free_ports(1)
    address, started = f"{socket.gethostbyname('localhost')}:{port}", list[subprocess.Popen[bytes]]()
    first = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    try:
        for name, options in (
            ("first", [*first, f"--temp-dir={folder}", '--resources={"first": 1}']),
            ("second", [f"--address={address}", "--node-ip-address=127.0.0.1", '--resources={"second": 1}']),
        ):
            log = folder / f"{name}.log"
            started.append(_start(log, *options, "--disable-usage-stats"))
            _until_ready(log, started[-1])
        yield RayCluster(address, (started[0], started[1]))
    finally:
        for process in reversed(started):
            _kill(process)
        shutil.rmtree(folder, ignore_errors=True)
