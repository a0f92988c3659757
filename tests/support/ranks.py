"""Starts the processes of a run: by torchrun, or one by one, so that each one's exit code and output can be seen."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.cli import sets
from tests.support.interrupts import hearing_ctrl_c
from tests.support.paths import ROOT


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """What was said, without the first line, progress and warnings."""
        progress = re.compile(
            r"warm start |iteration \d+/|warning: |.* iterations into |.*: computing everything again, "
        )
        return [line for line in self.err.splitlines() if not progress.match(line)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_ranks(*commands: list[str]) -> list[subprocess.Popen[str]]:
    """One process per command (arguments of the interpreter), with the environment torchrun would give it."""
    shared = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with hearing_ctrl_c():
        return [
            subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env={**os.environ, **shared, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, command in enumerate(commands)
        ]


def end(processes: list[subprocess.Popen[str]], seconds: float = 280.0) -> list[Ended]:
    """Wait for all of them; none may hang."""
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(p.returncode, *output) for p, output in zip(processes, outputs, strict=True)]


def cli_ranks(size: int, *arguments: str | Path) -> list[Ended]:
    """The program in `size` processes with the same arguments."""
    command = ["-m", "ppo_repro", *map(str, arguments)]
    return end(start_ranks(*[command] * size))


def torchrun(processes: int, *arguments: str | Path, module: str = "ppo_repro") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*command, "-m", module, *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=500, check=False,
    )  # fmt: skip


def fingerprint_of(processes: int, config: Path, out: Path, *overrides: str, module: str = "ppo_repro") -> str:
    """The fingerprint of a run in new processes."""
    done = torchrun(processes, "run", config, "--out", out, "--json", *sets(*overrides), module=module)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["fingerprint"])  # of one process alone: anything more is no JSON
