"""Read the numbers of a run, each with a name and a moment, and the sentences about the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.records import manifest, reader
from ppo_repro.records.manifest import Head
from ppo_repro.records.notes import end_time, read_accuracy, read_times
from ppo_repro.runs.summary import summarise

KEYS = ["iteration", "epoch", "minibatch", "ended_at"]


@dataclass(frozen=True)
class Scalar:
    """One number of a run; `moment` in seconds since 1970."""

    name: str
    value: float
    step: int
    moment: float


class RunNumbers:
    """Reader of the numbers of a recorded run, or of a run in progress."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._iterations, self._steps = run_dir, 0, 0

    def new(self) -> list[Scalar]:
        """Return every numeric column of the iterations since the last call, as `iteration/...` and `step/...`."""
        new = range(self._iterations, manifest.load_head(self._run_dir).num_iterations)
        if not new:
            return []
        recorded = manifest.load(self._run_dir)
        iterations = reader.read_iterations(self._run_dir, iterations=new, recorded=recorded)
        steps = reader.read_steps(self._run_dir, iterations=new, recorded=recorded)
        moments = [float(moment) for moment in iterations["ended_at"]]
        numbers = range(self._steps, self._steps + len(steps))
        step_moments = [moments[index] for index in steps["iteration"] - new[0]]
        self._iterations, self._steps = new.stop, numbers.stop
        return _columns(iterations, "iteration", new, moments) + _columns(steps, "step", numbers, step_moments)

    def ending(self) -> list[Scalar]:
        """Return the final results, accuracy and seconds, and each curve's point after the last iteration."""
        recorded = manifest.load_head(self._run_dir)
        moment = end_time(self._run_dir, recorded)
        final = {name: float(value) for name, value in recorded.final.items() if not isinstance(value, str)}
        curves = {column.name for table in manifest.tables_of(recorded) for column in table.columns} & final.keys()
        measured, spent = read_accuracy(self._run_dir, recorded), read_times(self._run_dir, recorded)
        groups = {
            "final": final,
            "accuracy": {} if measured is None else asdict(measured),
            "seconds": {} if spent is None else spent.seconds,
        }
        return [
            Scalar(f"iteration/{name}", final[name], recorded.num_iterations, moment)
            for name in sorted(curves)
            if not math.isnan(final[name])
        ] + [
            Scalar(f"{group}/{name}", float(value), 0, moment)
            for group, values in groups.items()
            for name, value in values.items()
            if not isinstance(value, str)  # the name of what the accuracy is compared with
        ]


def _columns(table: pd.DataFrame, group: str, steps: Sequence[int], moments: Sequence[float]) -> list[Scalar]:
    """Return every numeric column as `group/column`, without nulls."""
    return [
        Scalar(f"{group}/{name}", float(value), step, moment)
        for name, values in table.drop(columns=KEYS, errors="ignore").select_dtypes("number").items()
        for value, step, moment in zip(values.tolist(), steps, moments, strict=True)
        if pd.notna(value)
    ]


def sentences(run_dir: Path, head: Head) -> str:
    """Return the sentences of `show` about a complete run, or another run's progress, and the fingerprint, as a list.

    The list is Markdown.
    """
    all_sentences = [f"{head.status} after {head.num_iterations} complete iterations"]
    if head.status == "complete":
        all_sentences = summarise(run_dir).sentences
    return "\n".join(f"* {sentence}" for sentence in (*all_sentences, f"fingerprint {head.fingerprint}"))
