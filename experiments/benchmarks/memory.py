"""Does a run grow? Resident memory and seconds of each iteration of a small run, and their slopes over iterations.

`python -m experiments.benchmarks.memory --json memory.json` runs both numerics, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from ppo_repro.records import reader

CONFIG = Path(__file__).with_name("memory.yaml")
BLOCKS = 10  # a multiple of BLOCKS iterations is left after the warm-up; evaluations fall on every block alike


@dataclass(frozen=True)
class Slope:
    """A least-squares slope over iterations with its 95 % interval."""

    per_iteration: float
    low: float
    high: float
    mean: float  # of what is measured

    @property
    def is_flat(self) -> bool:
        """Whether the interval holds 0."""
        return self.low <= 0.0 <= self.high


@dataclass(frozen=True)
class Growth:
    """One run in one mode of numerics; the first `skipped` iterations, which fill caches, are in no slope."""

    mode: str
    iterations: int
    skipped: int
    memory: Slope  # KiB
    time: Slope  # microseconds
    recording: Slope  # microseconds of it outside the phases that compute: records, checkpoints, the manifest
    resident_kib: list[int]
    seconds: list[float]


def slope(values: list[float]) -> Slope:
    """Least squares over the means of BLOCKS equal blocks, with Student's interval.

    Single iterations are no independent draws (memory keeps what it was), means of blocks nearly are. What does not
    fill a block at the beginning is left out.
    """
    size = len(values) // BLOCKS
    kept = np.asarray(values[len(values) - size * BLOCKS :], np.float64)
    means = kept.reshape(BLOCKS, size).mean(1)
    centres = np.arange(BLOCKS) * size
    fit = stats.linregress(centres, means)
    half = float(stats.t.ppf(0.975, BLOCKS - 2)) * float(fit.stderr)
    return Slope(float(fit.slope), float(fit.slope) - half, float(fit.slope) + half, float(means.mean()))


def resident_kib() -> int:
    """Resident memory of this process, KiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") // 1024


def sample(mode: str, iterations: int, out: Path) -> None:
    """Run in this process and print one line `KiB seconds` for each iteration."""
    from ppo_repro.config_yaml import load_config
    from ppo_repro.runs.progress import Silent
    from ppo_repro.runs.run import run

    class Sampling(Silent):
        def __init__(self) -> None:
            self.last = time.perf_counter()

        def iteration(self, done: int, total: int, score: float, accuracy: float, approx_kl: float) -> None:
            now = time.perf_counter()
            print(resident_kib(), now - self.last, flush=True)
            self.last = time.perf_counter()

    run(load_config(CONFIG, [f"numerics.mode={mode}", f"ppo.iterations={iterations}"]), out, Sampling())


def measure(mode: str, iterations: int, skipped: int) -> Growth:
    """Sample a run in a process of its own; raises CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "experiments.benchmarks.memory", "--sample", mode, out]
        done = subprocess.run(
            [*command, "--iterations", str(iterations)], stdout=subprocess.PIPE, text=True, check=True
        )
        table = reader.read_iterations(next(Path(out).glob("*/*/manifest.json")).parent)
    rows = [line.split() for line in done.stdout.splitlines()]
    memory, seconds = [int(row[0]) for row in rows], [float(row[1]) for row in rows]
    computing = table[[name for name in table.columns if name.startswith("seconds_")]].sum(axis=1)
    outside = [1e6 * (total - spent) for total, spent in zip(seconds, computing, strict=True)]
    of_memory = slope([float(value) for value in memory[skipped:]])
    of_time = slope([1e6 * value for value in seconds[skipped:]])
    return Growth(mode, iterations, skipped, of_memory, of_time, slope(outside[skipped:]), memory, seconds)


def markdown(found: list[Growth]) -> str:
    """One row per mode and quantity."""
    lines = [
        "| numerics | of each iteration | mean | slope per iteration | 95 % interval | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for growth in found:
        rows = (
            ("resident memory", "KiB", growth.memory),
            ("time", "µs", growth.time),
            ("time of records and checkpoints", "µs", growth.recording),
        )
        for name, unit, s in rows:
            verdict = "flat: 0 is in the interval" if s.is_flat else "grows" if s.low > 0 else "falls"
            interval = f"[{s.low:+.2f}, {s.high:+.2f}]"
            lines.append(
                f"| {growth.mode} | {name} | {s.mean:,.0f} {unit} | {s.per_iteration:+.2f} | {interval} | {verdict} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Resident memory and time per iteration over a long small run.")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--skip", type=int, default=100, help="first iterations in no slope")
    parser.add_argument("--json", type=Path, help="write everything here too")
    parser.add_argument("--sample", nargs=2, metavar=("MODE", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sample:
        sample(arguments.sample[0], arguments.iterations, Path(arguments.sample[1]))
        return
    if not 0 <= arguments.skip <= arguments.iterations - 2 * BLOCKS:
        parser.error(f"--skip {arguments.skip}: must leave at least {2 * BLOCKS} of the iterations")
    found = [measure(mode, arguments.iterations, arguments.skip) for mode in ("exact", "native")]
    print(markdown(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(growth) for growth in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
