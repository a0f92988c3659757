"""What a run measured, as named numbers with the moment of each: read from its records, iteration by iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.records import accuracy, manifest, reader, times
from ppo_repro.records.manifest import Head

KEYS = {"iteration", "epoch", "minibatch", "ended_at"}


@dataclass(frozen=True)
class Scalar:
    """One number; `moment` in seconds since 1970."""

    name: str
    value: float
    step: int
    moment: float


@dataclass(frozen=True)
class Seen:
    """How much of a run is copied already."""

    iterations: int = 0
    steps: int = 0


def new_scalars(run_dir: Path, recorded: Head, seen: Seen) -> tuple[list[Scalar], Seen]:
    """Every numeric column of the iterations recorded since, as `iteration/column` and `step/column`."""
    new = range(seen.iterations, recorded.num_iterations)
    if not new:
        return [], seen
    iterations = reader.read_iterations(run_dir, iterations=new, allow_incomplete=True)
    steps = reader.read_steps(run_dir, iterations=new, allow_incomplete=True)
    moments = [float(moment) for moment in iterations["ended_at"]]
    numbers = range(seen.steps, seen.steps + len(steps))
    of_steps = [moments[index] for index in steps["iteration"] - new[0]]
    scalars = _columns(iterations, "iteration", new, moments) + _columns(steps, "step", numbers, of_steps)
    return scalars, Seen(recorded.num_iterations, seen.steps + len(steps))


def ending_scalars(run_dir: Path, recorded: Head, moment: float) -> list[Scalar]:
    """The final results, accuracy and seconds; also the last point of each curve that was evaluated after the run."""
    final = {name: float(value) for name, value in recorded.final.items() if not isinstance(value, str)}
    found = [Scalar(f"final/{name}", value, 0, moment) for name, value in final.items()]
    curves = {column.name for table in manifest.tables_of(recorded) for column in table.columns} & final.keys()
    found += [
        Scalar(f"iteration/{name}", final[name], recorded.num_iterations, moment)
        for name in sorted(curves)
        if not math.isnan(final[name])
    ]
    measured, spent = accuracy.read(run_dir, recorded), times.read(run_dir, recorded)
    numbers = {} if measured is None else measured.numbers()
    found += [Scalar(f"accuracy/{name}", float(value), 0, moment) for name, value in numbers.items()]
    seconds = {} if spent is None else spent.seconds
    return found + [Scalar(f"seconds/{phase}", value, 0, moment) for phase, value in seconds.items()]


def _columns(table: pd.DataFrame, group: str, steps: Sequence[int], moments: Sequence[float]) -> list[Scalar]:
    """Every numeric column as `group/column`, without nulls."""
    found = []
    for column in table.columns.difference(list(KEYS)):
        if pd.api.types.is_numeric_dtype(table[column]):
            rows = zip(table[column].tolist(), steps, moments, strict=True)
            found += [Scalar(f"{group}/{column}", float(v), s, at) for v, s, at in rows if pd.notna(v)]
    return found
