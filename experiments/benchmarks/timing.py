"""Measure wall and CPU seconds of interleaved candidates, and make tables of medians and ranges."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from ppo_repro.base.output import tell
from ppo_repro.numerics.library import cpu_words

Name = TypeVar("Name")


@dataclass(frozen=True)
class Cost:
    """Seconds of one execution. CPU seconds are the process's, including all threads and system time."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest value over rounds."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Measured:
    """One candidate of one comparison. `speedup` is the peer's wall seconds / the candidate's, round by round."""

    question: str
    model: str
    threads: int
    candidate: str
    tokens: int  # of one execution; 0 for a step, which has none
    rounds: int
    wall: Spread  # s
    cpu: Spread  # s
    speedup: Spread
    cpu_speedup: Spread  # the same of CPU seconds


REST = 0.05  # seconds before a candidate: threads of the one before it spin for milliseconds after their work


def cost_of(work: Callable[[], object]) -> Cost:
    """Call `work` once, and return its cost."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def spread(values: Sequence[float]) -> Spread:
    """Return median, smallest and largest value."""
    return Spread(median(values), min(values), max(values))


def interleaved(
    candidates: Mapping[Name, Callable[[], Cost]], rounds: int, warm_ups: int = 1
) -> dict[Name, list[Cost]]:
    """Return costs by candidate. Each round runs all candidates once, so a slow moment of the machine affects all."""
    costs: dict[Name, list[Cost]] = {name: [] for name in candidates}
    for index in range(warm_ups + rounds):
        for name, run in candidates.items():
            time.sleep(REST)
            cost = run()
            if index >= warm_ups:
                costs[name].append(cost)
    return costs


def compared(
    question: str, model: str, threads: int, tokens: int, costs: Mapping[str, Sequence[Cost]], peer: str
) -> list[Measured]:
    """Return one row per candidate, with its speed as a multiple of the peer's in the same round."""
    rows = []
    for name, own in costs.items():
        pairs = list(zip(costs[peer], own, strict=True))
        rows.append(
            Measured(
                question,
                model,
                threads,
                name,
                tokens,
                len(own),
                spread([c.wall for c in own]),
                spread([c.cpu for c in own]),
                spread([other.wall / c.wall for other, c in pairs]),
                spread([other.cpu / c.cpu for other, c in pairs]),
            )
        )
    return rows


def table(rows: Sequence[Measured]) -> str:
    """Return the rows as Markdown, with ranges over rounds in brackets."""
    lines = [
        "| question | model | threads | | rounds | wall s | CPU s | tokens/s | times faster than the peer | by CPU s |",
        "|" + "---|" * 10,
    ]
    for r in rows:
        speedup = f"{r.speedup.median:.2f} ({r.speedup.lowest:.2f}-{r.speedup.highest:.2f})"
        tokens = f"{r.tokens / r.wall.median:,.0f}" if r.tokens else ""
        lines.append(
            f"| {r.question} | {r.model} | {r.threads} | {r.candidate} | {r.rounds} "
            f"| {r.wall.median:.3f} ({r.wall.lowest:.3f}-{r.wall.highest:.3f}) | {r.cpu.median:.3f} "
            f"| {tokens} | {speedup} | {r.cpu_speedup.median:.2f} |"
        )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add the options that all benchmarks of speed have. `rounds` is the default number of rounds."""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"measured rounds (default {rounds})")
    parser.add_argument("--json", type=Path, help="also write the results to this file")


def report(rows: Sequence[Measured], path: Path | None) -> None:
    """Print the table; with a path, also write machine and rows there as JSON."""
    tell(table(rows))
    if path is not None:
        tree = {"machine": machine(), "results": [asdict(r) for r in rows]}
        path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, str | int]:
    """Return processor, cores and versions, for the head of a table."""
    return {
        "processor": " ".join(cpu_words("model name")) or platform.processor(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
