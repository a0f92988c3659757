"""Does a run grow, in memory or in time per iteration? Growth over the iterations of a small run.

`python -m experiments.benchmarks.memory --json memory.json` runs both numerics, each in a process of its own;
`--leak 1024` is the control: it keeps 1 KiB of every iteration, which must be detected.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
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
BLOCKS = 10  # the iterations after the warm-up are a multiple of this, with as many evaluations in every block
# growth per iteration that must not be missed: a gigabyte in a million iterations
MATTERS_KIB = 1.0
MATTERS_BLOCKS = 10.0  # of the interpreter, 100 bytes on average


@dataclass(frozen=True)
class Slope:
    """Change per iteration with its 95 % interval."""

    per_iteration: float
    low: float
    high: float
    mean: float  # of the measured values

    def verdict(self, matters: float) -> str:
        """Flat requires an interval that excludes growth of `matters`: a wide interval with 0 in it decides nothing."""
        if self.low > 0.0:
            return "grows"
        if self.high < 0.0:
            return "falls"
        if self.high >= matters:
            return f"undecided: 0 and {matters:g} are in the interval"
        return "flat: 0 is in the interval" + (f", {matters:g} is not" if math.isfinite(matters) else "")


@dataclass(frozen=True)
class Sample:
    """One iteration."""

    resident_kib: int
    allocated_kib: float  # given out by malloc; resident memory misses growth into malloc's free space
    blocks: int  # of the interpreter; those of at most 512 bytes are not from malloc
    seconds: float


@dataclass(frozen=True)
class Growth:
    """One run in one mode of numerics; slopes leave out the first `skipped` iterations, which fill caches."""

    mode: str
    iterations: int
    skipped: int
    resident: Slope  # KiB
    allocated: Slope  # KiB
    blocks: Slope
    time: Slope  # microseconds
    recording: Slope  # microseconds of it outside the phases that compute: records, checkpoints, the manifest
    samples: list[Sample]


def growth(values: list[float], skipped: int) -> Slope:
    """Mean change per iteration after the first `skipped` >= 1 values, with Student's interval over BLOCKS increments.

    Levels of memory are sums of all earlier changes, and least squares finds a slope in most random walks. Increments
    over blocks are independent draws. Noise around a level makes them negatively correlated, and the interval too
    wide, not too narrow.
    """
    size = (len(values) - skipped) // BLOCKS
    levels = np.asarray(values[len(values) - 1 - size * BLOCKS :: size], np.float64)
    increments = np.diff(levels) / size
    centre = float(increments.mean())
    half = float(stats.t.ppf(0.975, BLOCKS - 1)) * float(increments.std(ddof=1)) / BLOCKS**0.5
    return Slope(centre, centre - half, centre + half, float(np.mean(values[skipped:])))


def trend(values: list[float]) -> Slope:
    """Least squares over the means of BLOCKS equal blocks, with Student's interval: for times, which do not accumulate.

    The first iterations are left out where they do not fill a block.
    """
    size = len(values) // BLOCKS
    whole_blocks = np.asarray(values[len(values) - size * BLOCKS :], np.float64)
    means = whole_blocks.reshape(BLOCKS, size).mean(1)
    centres = np.arange(BLOCKS) * size
    fit = stats.linregress(centres, means)
    half = float(stats.t.ppf(0.975, BLOCKS - 2)) * float(fit.stderr)
    return Slope(float(fit.slope), float(fit.slope) - half, float(fit.slope) + half, float(means.mean()))


def resident_kib() -> int:
    """Resident memory of this process, KiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") // 1024


_MALLINFO2 = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]


def allocated_kib() -> float:
    """Memory that malloc has given out and not got back in this process, KiB; AttributeError without glibc 2.33."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return float(info.uordblks + info.hblkhd) / 1024


def fill_caches() -> None:
    """Bring two caches to their final size, which they would otherwise reach after thousands of iterations.

    NumPy keeps 7 freed blocks of each size below 1024 bytes, at most 3.5 MiB, so each new number of tokens adds some.
    CPython's table of interned strings reuses the slots of freed strings only when all slots are used; then it is
    rebuilt with three slots per string, which can double it.
    """
    for size in range(1, 1024):
        [np.empty(size, np.uint8) for _ in range(7)]
    for number in range(400_000):
        sys.intern(f"an interned string {number}")


def sample(mode: str, iterations: int, leak: int, out: Path) -> None:
    """Run in this process and print the fields of a Sample for each iteration; `leak`: bytes to keep per iteration."""
    from ppo_repro.config.files import load_config
    from ppo_repro.runs.language import LanguageKind
    from ppo_repro.runs.run import run
    from ppo_repro.watcher import Silent

    class Sampling(Silent):
        def __init__(self) -> None:
            self.last = time.perf_counter()
            self.kept: list[bytes] = []

        def iteration(self, done: int, total: int, figures: str) -> None:
            now = time.perf_counter()
            if done == 1:
                fill_caches()
            if leak:
                self.kept.append(bytes(leak))
            # the last iteration is reported after its checkpoint, the others before theirs
            if done < total:
                print(resident_kib(), allocated_kib(), sys.getallocatedblocks(), now - self.last, flush=True)
            self.last = time.perf_counter()

    config = load_config(CONFIG, [f"numerics.mode={mode}", f"ppo.iterations={iterations + 1}"])
    run(LanguageKind(Sampling()), config, out)


def measure(mode: str, iterations: int, skipped: int, leak: int = 0) -> Growth:
    """Sample a run in a process of its own; raises CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "experiments.benchmarks.memory", "--sample", mode, out]
        done = subprocess.run(
            [*command, "--iterations", str(iterations), "--leak", str(leak)],
            # malloc counts its per-thread cache, up to 7 blocks of each of 64 sizes, as given out
            env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        table = reader.read_iterations(next(Path(out).glob("*/*/manifest.json")).parent)[:iterations]
    rows = [line.split() for line in done.stdout.splitlines()]
    samples = [Sample(int(row[0]), float(row[1]), int(row[2]), float(row[3])) for row in rows]
    computing = table[[name for name in table.columns if name.startswith("seconds_")]].sum(axis=1)
    outside = [1e6 * (s.seconds - spent) for s, spent in zip(samples, computing, strict=True)]
    return Growth(
        mode,
        iterations,
        skipped,
        growth([float(s.resident_kib) for s in samples], skipped),
        growth([s.allocated_kib for s in samples], skipped),
        growth([float(s.blocks) for s in samples], skipped),
        trend([1e6 * s.seconds for s in samples[skipped:]]),
        trend(outside[skipped:]),
        samples,
    )


def markdown(runs: list[Growth]) -> str:
    """One row per mode and quantity."""
    lines = [
        "| numerics | of each iteration | mean | change per iteration | 95 % interval | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        rows = (
            ("resident memory", " KiB", run.resident, MATTERS_KIB),
            ("memory given out by malloc", " KiB", run.allocated, MATTERS_KIB),
            ("blocks of the interpreter", "", run.blocks, MATTERS_BLOCKS),
            ("time", " µs", run.time, math.inf),
            ("time of records and checkpoints", " µs", run.recording, math.inf),
        )
        for name, unit, s, matters in rows:
            interval = f"[{s.low:+.2f}, {s.high:+.2f}]"
            lines.append(
                f"| {run.mode} | {name} | {s.mean:,.0f}{unit} | {s.per_iteration:+.2f} | {interval} "
                f"| {s.verdict(matters)} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Memory and time per iteration over a long small run.")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--skip", type=int, default=100, help="first iterations that slopes leave out")
    parser.add_argument("--leak", type=int, default=0, help="control: bytes to keep of every iteration")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--sample", nargs=2, metavar=("MODE", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sample:
        sample(arguments.sample[0], arguments.iterations, arguments.leak, Path(arguments.sample[1]))
        return
    if not 1 <= arguments.skip <= arguments.iterations - 2 * BLOCKS:
        parser.error(f"--skip {arguments.skip}: must be at least 1 and leave at least {2 * BLOCKS} of the iterations")
    if arguments.leak < 0:
        parser.error(f"--leak {arguments.leak}: must be a number of bytes, 0 or more")
    runs = [measure(mode, arguments.iterations, arguments.skip, arguments.leak) for mode in ("exact", "native")]
    print(markdown(runs))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(growth) for growth in runs], indent=1) + "\n")


if __name__ == "__main__":
    main()
