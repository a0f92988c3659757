"""Read the notes of a run: JSON files outside the fingerprint, such as environment.json and times.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ppo_repro.base.clock import from_text
from ppo_repro.records import reader
from ppo_repro.records.folder import ACCURACY_NAME, CARD_NAME, ENVIRONMENT_NAME, RESUMED, STARTED, TIMES_NAME
from ppo_repro.records.manifest import Head

# ratio to the error of stock torch above which a run warns, by stock torch's dtype
LARGEST_RATIO = {"float32": 4.0, "bfloat16": 1.0}


def read_note(run_dir: Path, recorded: Head, name: str) -> dict[str, Any]:
    """Read a JSON file of a run folder and check its digest. Raises UserError if it is missing or damaged."""
    tree: dict[str, Any] = json.loads(reader.read_checked(run_dir / name, recorded.notes[name]))
    return tree


def resumed_notes(recorded: Head) -> list[str]:
    """Return the names of the notes that resumed processes wrote, in order."""
    return sorted(name for name in recorded.notes if Path(name).match(RESUMED))


def read_environments(run_dir: Path, recorded: Head) -> list[dict[str, Any]]:
    """Read environment.json, then the notes of resumed processes. Raises UserError if one is missing or damaged."""
    resumed = [read_note(run_dir, recorded, name)["environment"] for name in resumed_notes(recorded)]
    return [read_note(run_dir, recorded, ENVIRONMENT_NAME), *resumed]


def processes_by_iteration(run_dir: Path, recorded: Head) -> list[int]:
    """Return how many processes computed each recorded iteration. Raises UserError if a note is missing or damaged.

    An iteration that a resumed run only computed again counts for the processes that recorded it.
    """
    processes = [read_note(run_dir, recorded, ENVIRONMENT_NAME)["processes"]] * recorded.num_iterations
    for name in resumed_notes(recorded):
        note = read_note(run_dir, recorded, name)
        start = note.get("recorded", note["iteration"])  # older notes lack the iterations that were recorded then
        processes[start:] = [note["environment"]["processes"]] * len(processes[start:])
    return processes


@dataclass(frozen=True)
class Accuracy:
    """Differences in nats between the policy's log-probs and the unmodified model in float64, before the first step."""

    tokens: int  # scored
    deterministic_rms: float
    deterministic_max: float
    stock_rms: float  # by the unmodified model in `stock`
    stock_max: float
    ratio: float  # of the rms, deterministic / stock; stock counts as no better than float32 resolves
    stock: str = "float32"  # the peer of precision highest; that of high is "bfloat16", by autocast

    @property
    def is_low(self) -> bool:
        """Return whether the differences from float64 are larger than expected."""
        return not self.ratio <= LARGEST_RATIO[self.stock]  # nor may the ratio be NaN

    def sentence(self) -> str:
        """Return the measurement as a sentence."""
        return (
            f"log-probs of {self.tokens:,} tokens are {self.deterministic_rms:.2g} nats (rms) from the model in "
            f"float64, {self.deterministic_max:.2g} at most; stock {self.stock} {self.stock_rms:.2g} and "
            f"{self.stock_max:.2g}; ratio {self.ratio:.2f}"
            + (f", above {LARGEST_RATIO[self.stock]:g}" if self.is_low else "")
        )


def read_accuracy(run_dir: Path, recorded: Head) -> Accuracy | None:
    """Read accuracy.json; None if the run measured no accuracy. Raises UserError if the file is damaged."""
    return Accuracy(**read_note(run_dir, recorded, ACCURACY_NAME)) if ACCURACY_NAME in recorded.notes else None


@dataclass(frozen=True)
class OnCard:
    """The GPU that completed a run, and the CPU's check of it. A difference would have ended the run."""

    name: str
    capability: str  # compute capability
    driver: str
    cross_checked: int  # tokens whose log-probs the CPU computed too

    def sentence(self) -> str:
        """Return the GPU and the check as a sentence."""
        return (
            f"computed on {self.name} (compute capability {self.capability}, {self.driver}); {self.cross_checked:,} "
            "tokens computed on the CPU too, 0 differ"
        )


def read_card(run_dir: Path, recorded: Head) -> OnCard | None:
    """Read card.json; None for a run that no GPU completed. Raises UserError if the file is damaged."""
    return OnCard(**read_note(run_dir, recorded, CARD_NAME)) if CARD_NAME in recorded.notes else None


@dataclass(frozen=True)
class Times:
    """Wall seconds of the process that completed a run."""

    iterations: int  # that it computed; fewer than the run has where it was resumed
    seconds: dict[str, float]  # by phase


def read_times(run_dir: Path, recorded: Head) -> Times | None:
    """Read times.json; None for a run that is not complete. Raises UserError if the file is damaged."""
    return Times(**read_note(run_dir, recorded, TIMES_NAME)) if TIMES_NAME in recorded.notes else None


def phases_of(rows: pd.DataFrame) -> dict[str, float]:
    """Sum the wall seconds by phase over rows of the table `iterations`; phases that no row has are left out."""
    named = {c.removeprefix("seconds_"): rows[c] for c in rows.columns if c.startswith("seconds_")}
    return {phase: float(spent.sum()) for phase, spent in named.items() if not spent.isna().all()}


def by_phase(run_dir: Path, recorded: Head, in_iterations: Mapping[str, float]) -> dict[str, float]:
    """Return the wall seconds by phase of a run whose tables sum to `in_iterations`.

    If one process computed the run, they add up to its wall time. For a resumed run, phases of iterations count all
    recorded iterations, and the other phases (preparation, records, ...) count the last process.
    """
    times = read_times(run_dir, recorded)
    if times is None:
        return dict(in_iterations)
    if times.iterations == recorded.num_iterations:
        return {**times.seconds, "total": sum(times.seconds.values())}
    return {**times.seconds, **in_iterations}


def start_time(run_dir: Path, recorded: Head) -> float:
    """Return the time when the run began, in seconds since 1970."""
    return _moments(run_dir, recorded)[0]


def end_time(run_dir: Path, recorded: Head) -> float:
    """Return the time when the run ended, in seconds since 1970.

    It is the end of the last phase or, if the run is not complete, of the last complete iteration.
    """
    last_process, times = _moments(run_dir, recorded)[-1], read_times(run_dir, recorded)
    if times is not None:
        return last_process + sum(times.seconds.values())
    last = range(recorded.num_iterations)[-1:]
    rows = reader.read_iterations(run_dir, iterations=last, columns=["ended_at"], allow_incomplete=True)
    return max([last_process, *rows["ended_at"]])


def _moments(run_dir: Path, recorded: Head) -> list[float]:
    """Return the times at which the processes of the run began, in seconds since 1970."""
    return [from_text(tree[STARTED]) for tree in read_environments(run_dir, recorded)]
