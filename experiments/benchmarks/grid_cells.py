"""What a cell of a grid costs beside its run: seconds, files, bytes and flushes to the disk.

`python -m experiments.benchmarks.grid_cells --cells 1000 --workers 2` runs a grid of tiny cells, each of one iteration,
and some of them again, each in a process that imports by itself and with one worker. Their fingerprints must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from ppo_repro.grids.cell import Order, Result, run_cell
from ppo_repro.grids.engines import Engine, Processes
from ppo_repro.grids.grid import run_grid
from ppo_repro.grids.progress import ConsoleGrid
from ppo_repro.grids.spec import load_grid

BASE = {
    "experiment": "cell",
    "seed": 0,
    "model": {
        "kind": "tiny",
        "hidden_size": 16,
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": 16,
        "warm_start_steps": 2,
        "warm_start_batch_size": 4,
        "warm_start_learning_rate": 0.01,
    },
    "value": {"kind": "separate", "learning_rate": 0.001},
    "task": {"kind": "arithmetic", "max_operand": 5, "num_eval_prompts": 2},
    "rollout": {"prompts_per_iteration": 2, "samples_per_prompt": 2, "max_response_tokens": 4},
    "ppo": {"iterations": 1, "minibatch_size": 4, "epochs": 1, "learning_rate": 0.001},
    "numerics": {"max_context": 12},
}


@dataclass(frozen=True)
class OneProcessEach:
    """An engine without workers: every cell starts an interpreter, as on a cluster."""

    def check(self) -> None:
        """There is nothing to be missing."""

    def run(self, orders: Sequence[Order]) -> Iterator[Result | None]:
        yield from map(run_cell, orders)


@dataclass(frozen=True)
class Cost:
    """Of one grid; seconds and bytes are of one cell."""

    way: str
    cells: int
    wall_seconds: float
    cpu_seconds: float
    files: float
    kibibytes: float


def grid_file(folder: Path, cells: int) -> Path:
    """A grid of seeds."""
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    path = folder / "cells.yaml"
    tree = {"question": "What does a cell cost?", "expectation": "Less than its imports.", "base": "base.yaml"}
    path.write_text(yaml.safe_dump({**tree, "seeds": list(range(1, cells + 1))}))
    return path


def measure(way: str, engine: Engine, path: Path, out: Path) -> tuple[Cost, dict[str, str]]:
    """Run the grid; its cost and its fingerprints by cell."""
    wall, before = time.perf_counter(), _cpu()
    outcome = run_grid(load_grid(path), out, engine, ConsoleGrid())
    wall, spent = time.perf_counter() - wall, _cpu() - before
    table = outcome.table
    if not (table["state"] == "complete").all():
        raise SystemExit(f"cells are not complete:\n{table[['cell', 'state', 'message']].to_string()}")
    sizes = [path.stat().st_size for path in (out / path.stem / "cells").rglob("*") if path.is_file()]
    count = len(table)
    cost = Cost(way, count, wall / count, spent / count, len(sizes) / count, sum(sizes) / count / 1024)
    return cost, dict(zip(table["cell"], table["fingerprint"], strict=True))


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


COUNTING = """
import atexit, os, sys
count, real = [0], os.fsync
def counted(descriptor):
    count[0] += 1
    real(descriptor)
os.fsync = counted
atexit.register(lambda: print(count[0], file=sys.stderr))
from ppo_repro.commands import cli
cli.main()
"""


def flushes(folder: Path) -> int:
    """How often a run of `BASE` waits for the disk."""
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    command = [
        sys.executable,
        "-c",
        COUNTING,
        "run",
        str(folder / "base.yaml"),
        "--out",
        str(folder / "runs"),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stderr.split()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compared", type=int, default=10, help="cells that run with one worker and each alone, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, many = folder / "few", folder / "many"
        costs = []
        for each in (few, many):
            each.mkdir()
        path = grid_file(few, arguments.compared)
        ways: list[tuple[str, Engine]] = [("a process each", OneProcessEach()), ("one worker", Processes(1))]
        fingerprints = []
        for way, engine in ways:
            cost, found = measure(way, engine, path, few / way)
            costs.append(cost)
            fingerprints.append(found)
        cost, found = measure(
            f"{arguments.workers} workers",
            Processes(arguments.workers),
            grid_file(many, arguments.cells),
            many / "out",
        )
        costs.append(cost)
        flushed = flushes(folder)
        fingerprints.append({cell: found[cell] for cell in fingerprints[0] if cell in found})
    if fingerprints[0] != fingerprints[1] or any(fingerprints[0][cell] != fp for cell, fp in fingerprints[2].items()):
        raise SystemExit("the ways do not have the same fingerprints")
    print("| way | cells | wall s a cell | CPU s | files | KiB |")
    print("|---|---|---|---|---|---|")
    for cost in costs:
        print(
            f"| {cost.way} | {cost.cells} | {cost.wall_seconds:.2f} | {cost.cpu_seconds:.2f} "
            f"| {cost.files:.1f} | {cost.kibibytes:.0f} |"
        )
    print(f"a run of such a cell flushes {flushed} times; the grid 4 times for each cell")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1))


if __name__ == "__main__":
    main()
