"""A Slurm of two nodes on this machine, from Debian's packages, in a folder and on ports of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
READY_SECONDS = 60.0
END_SECONDS = 10.0
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=10000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=5
MessageTimeout=5
KillWait=5
MinJobAge=10
ReturnToService=2
{nodes}
PartitionName=cells Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    folder: Path
    slurmds: dict[str, subprocess.Popen[bytes]]  # by node

    def ask(self, *command: str) -> str:
        """The output of a command of Slurm's."""
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def state(self, node: str) -> str:
        """What the controller says of a node."""
        return self.ask("sinfo", "--noheader", f"--nodes={node}", "--format=%T").split()[0].rstrip("*")

    def jobs(self) -> dict[str, tuple[str, str]]:
        """State and node of every job in the queue, by id."""
        lines = self.ask("squeue", "--noheader", "--array", "--format=%i|%T|%N").splitlines()
        return {job.strip(): (state, node) for job, state, node in (line.split("|") for line in lines)}

    def lose(self, node: str) -> None:
        """Kill everything that runs on a node, as a power cut does."""
        slurmd = self.slurmds[node]
        for pid in [*descendants(slurmd.pid), *_steps(self.folder, node), slurmd.pid]:
            kill(pid)
        slurmd.wait()


def _parents() -> dict[int, int]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    return found


def descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    parents, found = _parents(), [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def _steps(folder: Path, node: str) -> list[int]:
    """The processes that keep the jobs of a node, which are no children of its slurmd, and those jobs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:
            continue
        ours = f"SLURM_CONF={folder}/slurm.conf".encode() in environment
        if ours and f"SLURMD_NODENAME={node}".encode() in environment:
            found.append(int(path.parent.name))
    parents = _parents()
    keepers = {parents[pid] for pid in found if pid in parents and _is_keeper(parents[pid])}
    return [*keepers, *found]


def _is_keeper(pid: int) -> bool:
    try:
        return "slurmstepd" in Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return False


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def _running(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(is_true: Sequence[str], expected: str, folder: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        done = subprocess.run(is_true, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0 and done.stdout.split() == expected.split():
            return
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("*.log")))
            raise RuntimeError(f"Slurm does not come up: {done.stdout}{done.stderr}\n{logs}")
        time.sleep(0.2)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster of two nodes with two CPUs each; the test is skipped where Slurm is not installed.

    Its configuration is in `SLURM_CONF` inside of the block.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"no {missing[0]} on this machine; see CONTRIBUTING.md")
    programs = {program: str(shutil.which(program, path=path)) for program in PROGRAMS}
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    ports = free_ports(1 + len(NODES))
    lines = [
        f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    user = pwd.getpwuid(os.getuid()).pw_name
    values = {"host": socket.gethostname(), "port": ports[0], "user": user, "folder": folder, "nodes": "\n".join(lines)}
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(**values))
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    munged = [programs["munged"], "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munged += [f"--key-file={folder}/munge.key", f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munged.log"]
    munged += [f"--seed-file={folder}/munge.seed"]
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        stack.enter_context(_running(munged, environment, folder / "munged.out.log"))
        controller = [programs["slurmctld"], "-D", "-f", str(conf)]
        stack.enter_context(_running(controller, environment, folder / "slurmctld.out.log"))
        slurmds = {}
        for node in NODES:
            command = [programs["slurmd"], "-D", "-N", node, "-f", str(conf)]
            slurmds[node] = stack.enter_context(_running(command, environment, folder / f"slurmd.{node}.out.log"))
        found = Cluster(folder, slurmds)
        _until(["sinfo", "--noheader", "--Node", "--partition=cells", "--format=%T"], "idle idle", folder)
        try:
            yield found
        finally:
            subprocess.run(["scancel", "--user", user], capture_output=True, timeout=60, check=False)
            for node in NODES:
                for pid in _steps(folder, node):
                    kill(pid)
