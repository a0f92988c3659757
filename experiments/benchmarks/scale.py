"""How does cost grow with tokens, sequence length, model size, recorded iterations and processes? And a cost model.

`python -m experiments.benchmarks.scale` measures CPU seconds of PPO iterations of small models in exact numerics on
one thread, fits CPU seconds = a + b products + c attention + d parameters x steps with coefficients >= 0, and reports
the error of the fit, with each case predicted from the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import nnls

from experiments.benchmarks import ppo_step, timing, workload
from experiments.benchmarks.workload import Size
from ppo_repro.config.files import load_config
from ppo_repro.config.kinds import LANGUAGE
from ppo_repro.disk import durable
from ppo_repro.loop import ppo_iterations
from ppo_repro.numerics import library
from ppo_repro.ranks import ALONE
from ppo_repro.records import iteration_log, manifest, reader, schema, writer
from ppo_repro.records.iteration_log import IterationEntry, TableEntry
from ppo_repro.runs.prepare import prepare

EPOCHS, MINIBATCHES, PROMPT = 2, 2, workload.PROMPT
BASE = Size("", 4, 128, 512, 1, 512)
QUICKSTART = Path(__file__).parents[1] / "quickstart.yaml"
TERMS = ("iteration", "products", "attention", "parameters x steps")


@dataclass(frozen=True)
class Case:
    """One point of the measurement."""

    axis: str
    size: Size
    sequences: int
    response: int


@dataclass(frozen=True)
class CaseCost:
    """CPU seconds and sampled tokens of one iteration of a case."""

    case: Case
    cpu: float
    tokens: int


def cases() -> list[Case]:
    """One axis at a time around a base."""
    tokens = [Case("tokens", BASE, n, 32) for n in (8, 16, 32, 64)]
    lengths = [Case("sequence length", BASE, 8, n) for n in (16, 64, 128, 256)]
    sizes = [Case("model size", replace(BASE, hidden=h, intermediate=4 * h), 16, 32) for h in (64, 256, 512)]
    return [*tokens, *lengths, *sizes]


def features(case: Case) -> list[float]:
    """The terms of the cost model for one iteration: 1, multiply-accumulates (two terms), parameters x steps.

    A token is multiplied by the weights once in the rollout, three times in scoring (policy, reference, value model)
    and six times an epoch (forward and backward, two networks). A query attends to half of the context on average.
    """
    inputs = case.sequences * (PROMPT + case.response - 1)
    passes = 1 + 3 + 6 * EPOCHS
    mean_context = (PROMPT + case.response) / 2
    size = case.size
    return [
        1.0,
        float(inputs * passes * workload.weights(size)),
        float(inputs * passes * size.layers * 2 * size.hidden * mean_context),
        float(2 * workload.weights(size) * EPOCHS * MINIBATCHES),
    ]


def measure(case: Case, rounds: int) -> CaseCost:
    """Median CPU seconds of an iteration, records not included, after one to warm up."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        workload.write_folder(case.size, folder, case.sequences + 1)
        config = load_config(
            ppo_step.CONFIG,
            [
                f"model.path={folder}",
                f"task.path={folder / 'prompts.jsonl'}",
                f"rollout.prompts_per_iteration={case.sequences}",
                f"rollout.max_response_tokens={case.response}",
                f"ppo.epochs={EPOCHS}",
                f"ppo.minibatch_size={case.sequences // MINIBATCHES}",
                f"numerics.max_context={PROMPT + case.response}",
            ],
        )
        prepared = ppo_step.without_stop(config, prepare(config, lambda step, total, loss: None))
        library.use_threads(1)
        iterations = ppo_iterations(config, prepared.task, prepared.state, prepared.engine, ALONE)
        costs = [timing.cost_of(lambda: next(iterations)) for _ in range(rounds + 1)][1:]
    return CaseCost(case, median(c.cpu for c in costs), case.sequences * case.response)


@dataclass(frozen=True)
class Fit:
    """Coefficients in seconds per unit of each term; errors are relative, each case predicted from the others."""

    coefficients: dict[str, float]
    median_error: float
    largest_error: float


def fit(results: Sequence[CaseCost]) -> Fit:
    """Least squares on relative errors, no coefficient negative."""
    x = np.array([features(f.case) for f in results])
    y = np.array([f.cpu for f in results])
    errors = []
    for left_out in range(len(results)):
        others = np.arange(len(results)) != left_out
        errors.append(abs(float(x[left_out] @ _solve(x[others], y[others])) / y[left_out] - 1.0))
    return Fit(dict(zip(TERMS, _solve(x, y).tolist(), strict=True)), median(errors), max(errors))


def _solve(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Coefficients that minimise sum (x b / y - 1)^2, b >= 0; columns scaled for the solver."""
    relative = x / y[:, None]
    scale = relative.max(0)
    return np.asarray(nnls(relative / scale, np.ones(len(y)))[0] / scale)


@dataclass(frozen=True)
class Committing:
    """The cost of the iterations recorded so far; medians of wall seconds on this machine's disk."""

    iterations: int
    commit: float  # checking the manifest, appending a line, replacing the manifest; three flushes
    load: float  # reading manifest and iterations


def committing(iterations: int) -> Committing:
    """Commit one more iteration to a run with this many; tables are not written."""
    tables = {table.name: TableEntry(rows=1, digest="0" * 64, file_digest="0" * 64) for table in schema.TABLES}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        writer.publish_run(writer.lay_out_run(run_dir, "{}\n", {}, "", {}, LANGUAGE), run_dir)
        head, lines = manifest.load_head(run_dir), []
        for index in range(iterations):
            entry = IterationEntry(index, tables, iteration_log.next_link(head.fingerprint, tables))
            lines.append(iteration_log.to_line(entry))
            digest = iteration_log.extended(head.log_digest, lines[-1])
            head = head.model_copy(update={"fingerprint": entry.chain, "log_digest": digest})
        durable.write_at(run_dir / iteration_log.FILE_NAME, 0, b"".join(lines))
        totals = {"num_iterations": iterations, "log_bytes": sum(map(len, lines))}
        manifest.save(head.model_copy(update=totals), run_dir)
        lines.clear()

        def commit() -> None:
            now = manifest.load_head(run_dir)
            link = iteration_log.next_link(now.fingerprint, tables)
            writer.commit(run_dir, now, [IterationEntry(now.num_iterations, tables, link)])

        def load() -> None:
            manifest.load(run_dir)

        return Committing(iterations, timing.median_seconds(commit, 5), timing.median_seconds(load, 5))


@dataclass(frozen=True)
class Processes:
    """Wall seconds of a short quickstart with this many processes."""

    processes: int
    update: float  # of the last iteration
    whole: float  # from the start of the command to its end
    iterations: float  # the part of `whole` inside iterations


def processes(count: int) -> Processes:
    """Measure `ppo-repro run`, under torchrun for several processes."""
    launcher = ["torch.distributed.run", f"--nproc-per-node={count}", "-m"] if count > 1 else []
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        command = [sys.executable, "-m", *launcher, "ppo_repro", "run", str(QUICKSTART), "--out", out]
        sets = ["--set", "ppo.iterations=4", "--set", "model.warm_start_steps=10"]
        subprocess.run([*command, *sets], check=True, capture_output=True)
        whole = time.perf_counter() - started
        rows = reader.read_iterations(next(Path(out).glob("*/*/manifest.json")).parent)
    phases = rows[[name for name in rows.columns if name.startswith("seconds_")]]
    return Processes(count, float(rows["seconds_update"].iloc[-1]), whole, float(phases.to_numpy().sum()))


def lines(
    results: Sequence[CaseCost], fitted: Fit, commits: Sequence[Committing], ranks: Sequence[Processes]
) -> Iterator[str]:
    """The tables as Markdown."""
    yield from ("| axis | hidden | sequences | response | tokens | CPU s | CPU ms per token |", "|" + "---|" * 7)
    for f in results:
        c = f.case
        where = f"{c.axis} | {c.size.hidden} | {c.sequences} | {c.response}"
        yield f"| {where} | {f.tokens} | {f.cpu:.3f} | {1e3 * f.cpu / f.tokens:.3f} |"
    named = {name: f"{value:.3g}" for name, value in fitted.coefficients.items()}
    yield ""
    yield f"seconds per unit: {named}"
    yield f"error of each case from the others: median {fitted.median_error:.0%}, largest {fitted.largest_error:.0%}"
    yield from ("", "| recorded iterations | committing one more, ms | reading all, ms |", "|---|---|---|")
    yield from (f"| {c.iterations:,} | {1e3 * c.commit:.1f} | {1e3 * c.load:.1f} |" for c in commits)
    yield from ("", "| processes | update s | start-up s | whole command s |", "|" + "---|" * 4)
    yield from (f"| {p.processes} | {p.update:.2f} | {p.whole - p.iterations:.1f} | {p.whole:.1f} |" for p in ranks)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measured growth of cost, and a cost model fitted to it.")
    parser.add_argument("--rounds", type=int, default=2, help="measured iterations of a case (default 2)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="numbers of processes (default 1 2)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    results = [measure(case, arguments.rounds) for case in cases()]
    fitted = fit(results)
    commits = [committing(count) for count in (100, 1_000, 10_000, 100_000)]
    ranks = [processes(count) for count in arguments.ranks]
    print("\n".join(lines(results, fitted, commits, ranks)))
    if arguments.json:
        tree = {
            "machine": timing.machine(),
            "cases": [asdict(f) for f in results],
            "fit": asdict(fitted),
            "committing": [asdict(c) for c in commits],
            "processes": [asdict(p) for p in ranks],
        }
        arguments.json.write_text(json.dumps(tree, indent=1) + "\n")


if __name__ == "__main__":
    main()
