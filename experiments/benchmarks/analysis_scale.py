"""Does the mismatch analysis stay linear in time and flat in memory, for token tables of a million rows and more?

`python -m experiments.benchmarks.analysis_scale --folder /tmp/scale` writes synthetic runs with the real writer, runs
each analysis over them in a fresh process, beside the same aggregates in DuckDB (installed into an environment of its
own under the folder), prints Markdown and JSON, and deletes the data. `--rows 100000000` measures one size. Nothing
else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ppo_repro.config.kinds import LANGUAGE
from ppo_repro.errors import UserError
from ppo_repro.output import print_json
from ppo_repro.records import arrow, manifest, schema, writer

ROOT = Path(__file__).resolve().parents[2]
TOKENS = schema.at_level(schema.TOKENS, "lean")
ROWS = (1_000_000, 10_000_000)
# one iteration: 4,000 responses of 250 tokens
LENGTH, ITERATION_ROWS = 250, 1_000_000
# measured: eight random float32 columns and a random token id, compressed, with room to spare
BYTES_PER_ROW = 60
WAYS = ("summary, contents", "summary, pages", "all tables, pages", "duckdb")
# aggregates of both sides and their largest relative difference: DuckDB adds floats in another order, has no expm1
# (exp(d) - 1 - d keeps four digits here) and approximates quantiles
SHARED = {"n_tokens": 0.0, "frac_bitwise_equal": 1e-9, "abs_mean": 1e-9, "k3": 1e-3, "ess_seq": 1e-9, "abs_p99": 0.02}


@dataclass(frozen=True)
class Result:
    """One analysis of one run, in a fresh process; times include its start."""

    way: str
    rows: int
    wall_seconds: float
    cpu_seconds: float
    peak_mib: float
    found: dict[str, float]

    @property
    def rows_per_second(self) -> float:
        """Of wall time."""
        return self.rows / self.wall_seconds


def token_columns(iteration: int, rows: int, seed: int) -> dict[str, Any]:
    """Random columns of one iteration: log-probs that differ in 40 % of the tokens by a few float32 steps."""
    generator = np.random.default_rng([seed, iteration])
    rollout = np.log(generator.random(rows, dtype=np.float32) ** 2 + np.float32(1e-6))
    noise = generator.standard_normal(rows, dtype=np.float32) * np.float32(2e-6)
    old = np.where(generator.random(rows, dtype=np.float32) < 0.6, rollout, rollout + noise)

    def normal() -> npt.NDArray[np.float32]:
        return generator.standard_normal(rows, dtype=np.float32)

    nothing = np.zeros(rows, np.float32)
    columns: dict[str, Any] = {column.name: nothing for column in TOKENS.columns if column.kind == "float32"}
    columns |= {c.name: np.zeros(rows, np.int32) for c in TOKENS.columns if c.kind == "int32"}
    columns |= {
        "iteration": np.full(rows, iteration, np.int32),
        "sequence": (np.arange(rows) // LENGTH).astype(np.int32),
        "position": (np.arange(rows) % LENGTH).astype(np.int32),
        "token_id": generator.integers(0, 50_000, rows).astype(np.int32),
        "rollout_logprobs": rollout,
        "old_logprobs": old,
        "ref_logprobs": rollout + normal(),
        "entropies": np.abs(normal()),
        "prob_sq_sums": np.abs(normal()),
        "raw_advantages": normal(),
        "advantages": normal(),
    }
    values = normal()
    present = np.ones(rows, dtype=bool)
    return columns | {"values": arrow.WithNulls(values, present), "returns": arrow.WithNulls(values + 1, present)}


def write_run(run_dir: Path, rows: int, seed: int = 0) -> None:
    """Write a complete run whose token table has `rows` rows; its other tables are empty."""
    writer.publish_run(writer.lay_out_run(run_dir, "{}\n", {}, "0", {}, LANGUAGE), run_dir)
    current = manifest.load_head(run_dir)
    columns = TextColumn("writing {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        for iteration in bar.track(range(math.ceil(rows / ITERATION_ROWS)), description=f"{rows:,} rows"):
            size = min(ITERATION_ROWS, rows - iteration * ITERATION_ROWS)
            tables = {
                table.name: arrow.to_arrow(table, {column.name: [] for column in table.columns})
                for table in (schema.at_level(table, "lean") for table in schema.TABLES)
            }
            tables["tokens"] = arrow.to_arrow(TOKENS, token_columns(iteration, size, seed))
            current = writer.append_iteration(run_dir, current, iteration, tables)
    writer.finish(run_dir, current, {})


CHILD = """
import json, resource, sys, time
started = time.perf_counter()
way, run_dir, rows = sys.argv[1:]
{body}
used = resource.getrusage(resource.RUSAGE_SELF)
# ru_maxrss would also cover the process that started this one
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({{"cpu": used.ru_utime + used.ru_stime, "peak": peak / 1024, "found": found}}))
"""

OURS = """
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from analysis.mismatch.tables import measure, summary_of, tables, watched, whole
from analysis.pairs.runs import run_pairs
columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
with Progress(*columns, console=Console(stderr=True)) as bar:
    task = bar.add_task(way, total=int(rows))
    pairs = run_pairs(run_dir, verify="contents" if "contents" in way else "pages")
    pairs = watched(pairs, lambda tokens: bar.advance(task, tokens))
    table = summary_of(pairs) if way.startswith("summary") else tables([whole(measure(pairs))]).update
found = dict(zip(table["metric"][::-1], table["value"][::-1]))
"""

DUCKDB = """
import duckdb
source = f"read_parquet('{run_dir}/records/tokens/*.parquet', hive_partitioning=false)"
pairs = (f"select iteration, sequence, rollout_logprobs a, old_logprobs b, "
    f"old_logprobs::double - rollout_logprobs::double d from {source}")
connection = duckdb.connect()
connection.execute("SET enable_progress_bar = false")  # it would be printed between the numbers
connection.execute("set threads = 1")
tokens = connection.execute(f"select count(*), avg((a = b)::int), avg(abs(d)), avg(exp(d) - 1 - d), avg(0.5 * d * d), "
    f"avg(-d), avg(exp(d)), avg(exp(abs(d))), corr(exp(a::double), exp(b::double)), max(abs(d)), min(exp(d)), "
    f"max(exp(d)), approx_quantile(abs(d), 0.99) from ({pairs})").fetchone()
sequences = connection.execute(f"select sum(w) ^ 2 / sum(w * w) / count(*), sum(k * k), sum(k * n), sum(n * n) from "
    f"(select exp(sum(d)) w, sum(0.5 * d * d) k, count(*) n from ({pairs}) group by iteration, sequence)").fetchone()
found = {"n_tokens": tokens[0], "frac_bitwise_equal": tokens[1], "abs_mean": tokens[2], "k3": tokens[3],
    "abs_p99": tokens[12], "ess_seq": sequences[0], "k2": tokens[4]}
"""


def environment(folder: Path) -> Path:
    """The Python of an environment with DuckDB and nothing else."""
    home = folder / "duckdb-venv"
    if not (home / "bin" / "python").exists():
        venv.create(home, with_pip=True)
    command = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "duckdb"]
    if subprocess.run(command, check=False).returncode:
        raise UserError(f"{home}: pip could not install duckdb; check the network, or leave it out with --no-peer")
    return home / "bin" / "python"


def measure(way: str, run_dir: Path, rows: int, python: Path | str) -> Result:
    """Run one analysis in a fresh process on one thread; raises RuntimeError where it fails."""
    body = DUCKDB if way == "duckdb" else OURS
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    command = [str(python), "-c", CHILD.format(body=body), way, str(run_dir), str(rows)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=settings, cwd=ROOT)
    wall = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{way} over {rows} rows ended with {done.returncode}")
    output = json.loads(done.stdout)
    return Result(way, rows, wall, output["cpu"], output["peak"], {name: output["found"][name] for name in SHARED})


def disagreements(results: Sequence[Result]) -> list[str]:
    """Messages about aggregates that differ by more than `SHARED` allows from the first result of the same rows."""
    messages = []
    for rows in sorted({result.rows for result in results}):
        first, *others = [result for result in results if result.rows == rows]
        for other in others:
            for name, allowed in SHARED.items():
                a, b = first.found[name], other.found[name]
                if abs(a - b) > allowed * abs(a):
                    messages.append(f"{rows} rows, {name}: {a!r} by {first.way}, {b!r} by {other.way}")
    return messages


def markdown(results: Sequence[Result]) -> str:
    """A table of the results."""
    lines = ["| rows | analysis | wall s | CPU s | peak MiB | rows/s |", "|---|---|---|---|---|---|"]
    for result in results:
        speed = f"{result.rows_per_second:,.0f}"
        times = f"{result.wall_seconds:.1f} | {result.cpu_seconds:.1f}"
        lines.append(f"| {result.rows:,} | {result.way} | {times} | {result.peak_mib:,.0f} | {speed} |")
    return "\n".join(lines)


def benchmark(rows: int, folder: Path, ways: Sequence[str]) -> list[Result]:
    """All analyses of one run, which is deleted at the end; raises UserError where the disk is too small."""
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = rows * BYTES_PER_ROW, shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"{folder}: {free >> 20} MiB free, {rows} rows need {needed >> 20}; choose another --folder")
    run_dir = folder / f"rows{rows}"
    try:
        write_run(run_dir, rows)
        peer = environment(folder) if "duckdb" in ways else Path()
        return [measure(way, run_dir, rows, peer if way == "duckdb" else sys.executable) for way in ways]
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where two analyses disagree, 2 where the arguments are wrong."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.analysis_scale", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="sizes of the token tables")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the data, which is deleted again")
    parser.add_argument("--no-peer", action="store_true", help="without DuckDB")
    arguments = parser.parse_args(argv)
    if min(arguments.rows) < 1:
        parser.error("--rows: every size must be at least 1")
    try:
        ways = WAYS[:-1] if arguments.no_peer else WAYS
        results = [result for rows in arguments.rows for result in benchmark(rows, arguments.folder, ways)]
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(arguments.folder / "duckdb-venv", ignore_errors=True)
    print(markdown(results))
    wrong = disagreements(results)
    print_json({"results": [asdict(result) for result in results], "disagreements": wrong})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
