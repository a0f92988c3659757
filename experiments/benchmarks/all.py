"""Every benchmark of speed, one after the other, in one table: `python -m experiments.benchmarks.all --peers DIR`.

Writes `benchmarks.md` and `benchmarks.json` to --out. `--quick` measures the small model on one thread in one round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks import ppo_step, recording, rollout, timing
from experiments.benchmarks.peers import environment
from experiments.benchmarks.timing import Measured
from ppo_repro.config.files import load_config

# targets of exact numerics: question -> times faster than the peer
TARGETS = {rollout.QUESTION: 1.5, ppo_step.QUESTION: 2.0}
RECORDING_SHARE, RECORD_BYTES, HELP_SECONDS = 0.02, 60.0, 0.3


@dataclass(frozen=True)
class Verdict:
    """One target and what was measured."""

    what: str
    target: str
    measured: str
    reached: bool


@dataclass(frozen=True)
class Extent:
    """The sizes, threads and rounds that are measured."""

    rollout_sizes: tuple[str, ...]
    step_sizes: tuple[str, ...]
    threads: tuple[int, ...]
    rounds: int
    iterations: int  # of the recording benchmark


QUICK = Extent(("small",), ("small",), (1,), 1, 6)
USUAL = Extent(("small", "large"), ("small",), (1, 2), 3, 12)
WHOLE = Extent(("small", "large"), ("small", "large"), (1, 2), 5, 21)


def help_seconds(rounds: int = 7) -> float:
    """Median wall seconds of `ppo-repro --help`."""
    command = [sys.executable, "-m", "ppo_repro", "--help"]
    return timing.median_seconds(lambda: subprocess.run(command, check=True, capture_output=True), rounds)


def speed_verdicts(rows: list[Measured]) -> list[Verdict]:
    """The targets of exact numerics beside peers."""
    return [
        Verdict(
            f"{r.question}, {r.model}, {r.threads} threads",
            f"{TARGETS[r.question]:.1f} times as fast",
            # on a busy machine the two ratios differ, and that of wall time says nothing
            f"{r.speedup.median:.2f} ({r.speedup.lowest:.2f}-{r.speedup.highest:.2f}); "
            f"by CPU s {r.cpu_speedup.median:.2f}",
            r.speedup.median >= TARGETS[r.question],
        )
        for r in rows
        if r.candidate == "exact"
    ]


def recording_verdicts(ways: list[recording.Way], disk: recording.Disk) -> list[Verdict]:
    """The targets of recording everything."""
    share = next(way.share for way in ways if way.name == "on a thread")
    same = recording.same_bits(ways)
    return [
        Verdict("recording, share of wall time", f"{RECORDING_SHARE:.0%}", f"{share:.2%}", share <= RECORDING_SHARE),
        Verdict(
            "bytes per token record",
            f"{RECORD_BYTES:.0f}",
            f"{disk.per_token_record:.1f}",
            disk.per_token_record <= RECORD_BYTES,
        ),
        Verdict("without recording", "the same bits", "the same" if same else "DIFFERENT", same),
    ]


def verdict_table(verdicts: list[Verdict]) -> str:
    """The verdicts as Markdown."""
    lines = ["| what | target | measured | |", "|---|---|---|---|"]
    lines += [f"| {v.what} | {v.target} | {v.measured} | {'reached' if v.reached else 'missed'} |" for v in verdicts]
    return "\n".join(lines)


def take(peers: Path, extent: Extent) -> tuple[str, dict[str, Any]]:
    """Measure, and return the page and the tree for JSON."""
    python = environment.make(peers / "trl")
    rows = rollout.measure(extent.rollout_sizes, extent.threads, extent.rounds)
    rows += ppo_step.measure(python, extent.step_sizes, extent.threads, extent.rounds)
    config = load_config(recording.QUICKSTART, [f"ppo.iterations={extent.iterations}", "model.warm_start_steps=20"])
    with tempfile.TemporaryDirectory() as folder:
        ways, disk = recording.measure(config, Path(folder))
    seconds = help_seconds()
    start_up = Verdict("ppo-repro --help", f"{HELP_SECONDS} s", f"{seconds:.2f} s", seconds < HELP_SECONDS)
    verdicts = [*speed_verdicts(rows), *recording_verdicts(ways, disk), start_up]
    machine = timing.machine()
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    page = "\n\n".join([about, verdict_table(verdicts), timing.table(rows), recording.markdown(ways, disk)])
    tree = {
        "machine": machine,
        "verdicts": [asdict(v) for v in verdicts],
        "results": [asdict(r) for r in rows],
        "recording": {"ways": [asdict(w) for w in ways], "disk": asdict(disk)},
        "help_seconds": seconds,
    }
    return page + "\n", tree


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Every benchmark of speed in one table.")
    parser.add_argument("--peers", type=Path, required=True, help="folder for the environments of the peers")
    parser.add_argument("--out", type=Path, default=Path("."), help="where benchmarks.md and benchmarks.json go")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="small models, one thread, one round")
    how.add_argument("--whole", action="store_true", help="PPO steps of the large model too: an hour")
    arguments = parser.parse_args()
    page, tree = take(arguments.peers, QUICK if arguments.quick else WHOLE if arguments.whole else USUAL)
    print(page, end="")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "benchmarks.md").write_text(page, encoding="utf-8")
    (arguments.out / "benchmarks.json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
