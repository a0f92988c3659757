"""When a run began and ended, and what it did with its time. Nothing of it is in the fingerprint.

times.json of a complete run has the wall seconds by phase of the process that completed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.clock import from_text
from ppo_repro.records import reader
from ppo_repro.records.config_file import read_environments, read_note
from ppo_repro.records.manifest import Head

FILE_NAME = "times.json"
STARTED = "started"  # when a process began, in environment.json and in the environment of each resumed-NNN.json


@dataclass(frozen=True)
class Times:
    """What the last process of a run did with its time."""

    iterations: int  # that it computed; fewer than the run has where it was resumed
    seconds: dict[str, float]  # by phase


def read(run_dir: Path, recorded: Head) -> Times | None:
    """The times of a run, None for one that is not complete; UserError where the file is damaged."""
    return Times(**read_note(run_dir, recorded, FILE_NAME)) if FILE_NAME in recorded.notes else None


def phases_of(rows: pd.DataFrame) -> dict[str, float]:
    """Wall seconds by phase of some rows of the table `iterations`; without phases that no row has."""
    named = {c.removeprefix("seconds_"): rows[c] for c in rows.columns if c.startswith("seconds_")}
    return {phase: float(spent.sum()) for phase, spent in named.items() if not spent.isna().all()}


def by_phase(run_dir: Path, recorded: Head, in_iterations: Mapping[str, float]) -> dict[str, float]:
    """Wall seconds by phase of a run whose tables sum to `in_iterations`.

    Of a run by one process they add up to its wall time. Of a resumed one the phases of iterations are those of all
    recorded iterations, and the others (preparation, records, ...) those of its last process.
    """
    times = read(run_dir, recorded)
    if times is None:
        return dict(in_iterations)
    if times.iterations == recorded.num_iterations:
        return {**times.seconds, "total": sum(times.seconds.values())}
    return {**times.seconds, **in_iterations}


def started(run_dir: Path, recorded: Head) -> float:
    """When the run began, in seconds since 1970."""
    return _moments(run_dir, recorded)[0]


def ended(run_dir: Path, recorded: Head) -> float:
    """When the run ended, in seconds since 1970: after the last phase, or else with its last complete iteration."""
    last_process, times = _moments(run_dir, recorded)[-1], read(run_dir, recorded)
    if times is not None:
        return last_process + sum(times.seconds.values())
    last = range(recorded.num_iterations)[-1:]
    rows = reader.read_iterations(run_dir, iterations=last, columns=["ended_at"], allow_incomplete=True)
    return max([last_process, *rows["ended_at"]])


def _moments(run_dir: Path, recorded: Head) -> list[float]:
    """When each process of the run began."""
    return [from_text(tree[STARTED]) for tree in read_environments(run_dir, recorded)]
