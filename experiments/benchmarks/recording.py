"""What does recording cost: its share of the time, its bytes on disk, and does it change a bit?

`python -m experiments.benchmarks.recording` runs one configuration (default: the quickstart) in several ways, in turn:
not recorded; at each level recorded on a thread of its own as `ppo-repro run` does; and at the usual level before the
next iteration begins. All must end with the same weights in every bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from experiments.benchmarks import timing
from ppo_repro.buffers import Iteration
from ppo_repro.config.files import build_config, load_config
from ppo_repro.config.kinds import LANGUAGE
from ppo_repro.config.run import RunConfig
from ppo_repro.loop import ppo_iterations
from ppo_repro.numerics import library
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.ranks import ALONE
from ppo_repro.records import manifest, writer
from ppo_repro.records.schema import LEVELS
from ppo_repro.runs.lifetime import appending
from ppo_repro.runs.prepare import Prepared, prepare
from ppo_repro.runs.tables import iteration_tables

QUICKSTART = Path(__file__).parents[1] / "quickstart.yaml"
NOT_RECORDED, WAITING = "not recorded", "full, before going on"
WAYS = (NOT_RECORDED, *LEVELS, WAITING)
TURN = 3  # consecutive iterations of one way, so that the thread writes beside its own run
Record = Callable[[Iteration], None]


@dataclass(frozen=True)
class Way:
    """One way to record. Seconds are medians over iterations."""

    name: str
    iteration: float  # wall, records included
    cpu: float
    recording: float  # wall that the loop spends on records: building tables, waiting for the thread or the disk
    share: float  # recording / wall, over all iterations
    policy_digest: str  # after the last iteration
    value_digest: str


@dataclass(frozen=True)
class Disk:
    """Bytes of the Parquet files by table, and their rows."""

    bytes: dict[str, int]
    rows: dict[str, int]

    @property
    def per_token_record(self) -> float:
        """All bytes of all tables over the rows that describe a token: in `tokens`, and in `updates` once per epoch."""
        return sum(self.bytes.values()) / (self.rows["tokens"] + self.rows["updates"])

    @property
    def per_token(self) -> float:
        """All bytes of all tables over sampled tokens."""
        return sum(self.bytes.values()) / self.rows["tokens"]


@contextmanager
def _recorder(way: str, config: RunConfig, run_dir: Path) -> Iterator[Record]:
    if way == NOT_RECORDED:
        yield lambda item: None
        return
    writer.publish_run(writer.lay_out_run(run_dir, "", {}, config.digest(), {}, LANGUAGE), run_dir)
    with appending(run_dir, manifest.load_head(run_dir)) as appender:

        def record(item: Iteration) -> None:
            appender.start(item.index, iteration_tables(item, config))
            if way == WAITING:
                appender.settle()

        yield record
        appender.settle()


def _take(config: RunConfig, prepared: Prepared, way: str, run_dir: Path) -> Iterator[tuple[float, float, float]]:
    """(wall, CPU, wall of recording) of each iteration."""
    with _recorder(way, config, run_dir) as record:
        before, cpu = time.perf_counter(), time.process_time()
        for item in ppo_iterations(config, prepared.task, prepared.state, prepared.engine, ALONE):
            started = time.perf_counter()
            record(item)
            now, now_cpu = time.perf_counter(), time.process_time()
            yield now - before, now_cpu - cpu, now - started
            # after the pause in which another way takes its turn
            before, cpu = time.perf_counter(), time.process_time()


def at_level(config: RunConfig, way: str) -> RunConfig:
    """The configuration of a way to record."""
    level = way if way in LEVELS else "full" if way == WAITING else "lean"
    return build_config({**config.model_dump(mode="json"), "records": {"level": level}}, way)


def measure(config: RunConfig, folder: Path) -> tuple[list[Way], dict[str, Disk]]:
    """All ways in turn, TURN iterations at a time, and the disk by level.

    The first turn, which compiles and fills caches, is not measured.
    """
    configs = {way: at_level(config, way) for way in WAYS}
    prepared = {way: prepare(configs[way], lambda step, total, loss: None) for way in WAYS}
    takes = {way: _take(configs[way], prepared[way], way, folder / way.replace(" ", "-")) for way in WAYS}
    library.use_threads(config.layout.threads)
    times: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(config.ppo.iterations // TURN):
        for way in WAYS:
            times[way] += [next(takes[way]) for _ in range(TURN)]
    for way in WAYS:  # lets the writers finish
        assert next(takes[way], None) is None
    rows: list[Way] = []
    for way in WAYS:
        state, measured = prepared[way].state, times[way][TURN:]
        wall, cpu, recording = (list(column) for column in zip(*measured, strict=True))
        digests = weights_digest(state.policy.named_parameters()), weights_digest(state.value_parameters().items())
        share = sum(recording) / sum(wall)
        rows.append(Way(way, median(wall), median(cpu), median(recording), share, *digests))
    return rows, {level: disk_of(folder / level) for level in LEVELS}


def disk_of(run_dir: Path) -> Disk:
    """Bytes and rows of a run's tables."""
    recorded = manifest.load(run_dir)
    sizes, rows = {}, {}
    for table in manifest.tables_of(recorded):
        sizes[table.name] = sum(path.stat().st_size for path in (run_dir / "records" / table.name).glob("*.parquet"))
        rows[table.name] = sum(entry.tables[table.name].rows for entry in recorded.iterations)
    return Disk(sizes, rows)


def same_bits(ways: Sequence[Way]) -> bool:
    """Whether all ways ended with the same weights."""
    return len({(way.policy_digest, way.value_digest) for way in ways}) == 1


def markdown(ways: Sequence[Way], disks: Mapping[str, Disk]) -> str:
    """Times, then bytes."""
    lines = ["| records | iteration s | CPU s | of it recording s | share of wall time |", "|" + "---|" * 5]
    lines += [f"| {w.name} | {w.iteration:.4f} | {w.cpu:.4f} | {w.recording:.4f} | {w.share:.2%} |" for w in ways]
    some = list(disks.values())
    lines += ["", f"| bytes per row | rows | {' | '.join(disks)} |", "|" + "---|" * (2 + len(some))]
    for name, rows in some[0].rows.items():
        lines.append(f"| {name} | {rows:,} | {' | '.join(f'{d.bytes[name] / rows:.1f}' for d in some)} |")
    lines += [
        f"| all, per token record | | {' | '.join(f'{d.per_token_record:.1f}' for d in some)} |",
        f"| all, per sampled token | | {' | '.join(f'{d.per_token:.1f}' for d in some)} |",
        "",
        "weights after the last iteration: " + ("the same bits in every way" if same_bits(ways) else "DIFFERENT"),
    ]
    return "\n".join(lines)


def main() -> int:
    """Command line; exit 1 where recording changes a bit."""
    parser = argparse.ArgumentParser(description="Time and bytes of recording everything.")
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--set", action="append", default=[], help="override a field of the configuration")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if arguments.iterations % TURN or arguments.iterations < 2 * TURN:
        parser.error(f"--iterations {arguments.iterations}: must be a multiple of {TURN}, at least {2 * TURN}")
    config = load_config(arguments.config, [*arguments.set, f"ppo.iterations={arguments.iterations}"])
    with tempfile.TemporaryDirectory() as folder:
        ways, disks = measure(config, Path(folder))
    print(markdown(ways, disks))
    if arguments.json:
        tree = {
            "machine": timing.machine(),
            "ways": [asdict(w) for w in ways],
            "disk": {level: asdict(disk) for level, disk in disks.items()},
        }
        arguments.json.write_text(json.dumps(tree, indent=1) + "\n")
    return 0 if same_bits(ways) else 1


if __name__ == "__main__":
    raise SystemExit(main())
