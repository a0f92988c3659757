"""Compare a PPO step of two processes with one thread each with a step of one process with two threads.

`python -m experiments.benchmarks.ranks` starts both, and requests a step from each in turn. Both begin with the same
weights and prompts, as in `ppo_step`, in deterministic numerics. CPU seconds are those of all processes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from experiments.benchmarks import timing, workload
from experiments.benchmarks.peers import process
from experiments.benchmarks.ppo_step import PROMPTS, QUESTION, own
from experiments.benchmarks.timing import Cost, Measured
from experiments.benchmarks.workload import SIZES
from ppo_repro.base.processes import processes
from ppo_repro.base.ranks import joined

ONE, TWO = "1 process, 2 threads", "2 processes, 1 thread each"


def serve(folder: Path) -> None:
    """Compute a step on every line that the first process reads, `step THREADS`, and print its cost."""
    with joined(*processes()) as ranks:
        run = own(folder, ranks=ranks)
        while line := ranks.first(sys.stdin.readline):
            cost = run.step(int(line.split()[1]))
            cpu = sum(ranks.everyone(cost.cpu))
            if ranks.is_first:
                sys.stdout.write(json.dumps(asdict(Cost(cost.wall, cpu))) + "\n")
                sys.stdout.flush()


def measure(name: str, rounds: int) -> list[Measured]:
    """Measure one size. Each candidate is a process, or several, with a folder of its own."""
    size, module = SIZES[name], ["-m", "experiments.benchmarks.ranks", "--serve"]
    with tempfile.TemporaryDirectory() as text:
        one, two = Path(text, "one"), Path(text, "two")
        for folder in (one, two):
            folder.mkdir()
            workload.write_folder(size, folder, PROMPTS)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        with (
            process.started([sys.executable, *module, str(one)], one / "log") as first,
            process.started([sys.executable, *torchrun, *module, str(two)], two / "log") as second,
        ):
            candidates = {ONE: partial(first.step, 2), TWO: partial(second.step, 1)}
            costs = timing.interleaved(candidates, rounds)
    return timing.compared(QUESTION, size.name, 2, workload.SEQUENCES * workload.RESPONSE, costs, ONE)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="A PPO step of two processes, against one with two threads.")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    timing.add_options(parser, rounds=5)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return
    rows = [row for name in arguments.sizes for row in measure(name, arguments.rounds)]
    timing.report(rows, arguments.json)


if __name__ == "__main__":
    main()
