"""times.json of a complete run: wall seconds by phase of the process that completed it. Not in the fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.disk import durable
from ppo_repro.records import manifest
from ppo_repro.records.config_file import read_note
from ppo_repro.records.manifest import Head

FILE_NAME = "times.json"


@dataclass(frozen=True)
class Times:
    """What the last process of a run did with its time."""

    iterations: int  # that it computed; fewer than the run has where it was resumed
    seconds: dict[str, float]  # by phase


def write(run_dir: Path, times: Times) -> dict[str, str]:
    """Write times.json; returns its digest by file name, for the manifest. UserError where writing fails."""
    content = manifest.note_content({"iterations": times.iterations, "seconds": times.seconds})
    durable.atomic_write(run_dir / FILE_NAME, content)
    return {FILE_NAME: manifest.content_digest(content)}


def read(run_dir: Path, recorded: Head) -> Times | None:
    """The times of a run; None for one that is not complete, or of an earlier version. UserError where damaged."""
    if FILE_NAME not in recorded.notes:
        return None
    tree = read_note(run_dir, recorded, FILE_NAME)
    return Times(int(tree["iterations"]), {str(phase): float(spent) for phase, spent in tree["seconds"].items()})


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
