"""What does a whole run take under each mesh: time, and the peak of each process beside the plan?

`python -m experiments.benchmarks.mesh_runs --folder DIR [--processes 2]` makes a Qwen3 of random weights in DIR, runs
PPO on it in one process with one thread and with two, and in several processes with one thread each, and prints a
table. Exit status 1 if fingerprints differ.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.benchmarks.peak import CONFIG, make_folder

PHASES = ("rollout", "forward", "update", "digests")
WORK = ("rollout.prompts_per_iteration=8", "ppo.minibatch_size=8", "layout.rollout_slots=16", "ppo.iterations=2")


@dataclass(frozen=True)
class Row:
    """A run: wall seconds of its iterations by phase, and of each process the largest resident set; bytes."""

    mesh: str
    processes: int
    threads: int
    seconds: dict[str, float]
    measured: list[int]
    planned: int
    fingerprint: str


def meshes(processes: int) -> list[str]:
    """Every mesh of so many processes."""
    zero = [f"{{data: {processes}, zero: {stage}}}" for stage in range(4)]
    return [*zero, f"{{data: 1, tensor: {processes}}}", f"{{data: 1, pipeline: {processes}}}"]


def planned(overrides: Sequence[str], processes: int) -> int:
    """The peak of the plan, bytes."""
    from ppo_repro.config.files import load_config
    from ppo_repro.plan.shapes import plan_run

    return plan_run(load_config(CONFIG, list(overrides)), processes).peak


def measure(mesh: str, processes: int, threads: int, overrides: Sequence[str], folder: Path) -> Row:
    """Run once; CalledProcessError where a process fails."""
    sets = [*overrides, f"layout.threads={threads}", *([f"layout.mesh={mesh}"] if processes > 1 else [])]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads)}
    shared |= {"WORLD_SIZE": str(processes)}
    with tempfile.TemporaryDirectory(dir=folder) as out:
        arguments = [part for override in sets for part in ("--set", override)]
        command = [sys.executable, "-m", "ppo_repro", "run", str(CONFIG), "--out", out, "--json", *arguments]
        started = [
            subprocess.Popen(
                command,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=(Path(out) / f"{rank}.json").open("w"),
                stderr=subprocess.DEVNULL,
            )
            for rank in range(processes)
        ]
        ended = [os.wait4(process.pid, 0) for process in started]
        if any(status for _, status, _ in ended):
            raise subprocess.CalledProcessError(1, command)
        found = json.loads((Path(out) / "0.json").read_text())
    seconds = {phase: found["seconds"].get(phase, 0.0) for phase in PHASES}
    peaks = [1024 * used.ru_maxrss for _, _, used in ended]
    return Row(mesh, processes, threads, seconds, peaks, planned(sets, processes), found["fingerprint"])


def markdown(row: Row) -> str:
    """A line of the table: seconds, and decimal gigabytes of the process with the most."""
    times = " | ".join(f"{row.seconds[phase]:.2f}" for phase in PHASES)
    most = max(row.measured)
    sizes = f"{min(row.measured) / 1e9:.2f} to {most / 1e9:.2f} | {row.planned / 1e9:.2f} | {row.planned / most:.2f}"
    name = f"`{row.mesh}`" if row.processes > 1 else "one process"
    return f"| {name} | {row.processes} | {row.threads} | {times} | {sum(row.seconds.values()):.2f} | {sizes} |"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="time and memory of a run under each mesh")
    parser.add_argument("--folder", type=Path, required=True, help="where the model is made, and runs are written")
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--mesh", action="append", default=[], help="only these, as in YAML")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as of `ppo-repro run`")
    arguments = parser.parse_args()
    model = arguments.folder / f"qwen3-{arguments.hidden}-{arguments.layers}-{arguments.vocab_size}"
    if not (model / "config.json").is_file():
        make_folder(model, arguments.layers, arguments.vocab_size, arguments.hidden)
    overrides = [f"model.path={model}", *WORK, *arguments.set]
    print(f"| mesh | processes | threads each | {' | '.join(PHASES)} | s in all | GB measured | planned | ratio |")
    print("|---" * (len(PHASES) + 7) + "|", flush=True)
    fingerprints = set()
    cases = [("", 1, 1), ("", 1, 2)]
    cases += [(mesh, count, 1) for count in arguments.processes for mesh in arguments.mesh or meshes(count)]
    for mesh, count, threads in cases:
        row = measure(mesh, count, threads, overrides, arguments.folder)
        print(markdown(row), flush=True)
        fingerprints.add(row.fingerprint)
    return 0 if len(fingerprints) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
