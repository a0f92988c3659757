"""What a run measured, as named numbers with the moment of each, and what it says about itself in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.config.kinds import CONTROL
from ppo_repro.control.summary import CONTROL_RUNS
from ppo_repro.dpo import records as dpo_records
from ppo_repro.records import accuracy, manifest, reader, times
from ppo_repro.records.manifest import Head
from ppo_repro.runs.summary import LANGUAGE_RUNS

KEYS = ["iteration", "epoch", "minibatch", "ended_at"]
# a column of `iterations` that counts disagreements -> the name of the promise
PROMISES = {
    "unequal_old_rollout_logprobs": "sampler_and_trainer_agree",
    "unequal_first_ratios": "first_ratios_are_one",
    "unequal_values": "values_agree",
}


@dataclass(frozen=True)
class Scalar:
    """One number; `moment` in seconds since 1970."""

    name: str
    value: float
    step: int
    moment: float


class RunNumbers:
    """The numbers of a recorded run of PPO, which may still work."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._iterations, self._steps = run_dir, 0, 0

    def new(self) -> list[Scalar]:
        """Every numeric column of the iterations recorded since the last call: `iteration/...` and `step/...`."""
        new = range(self._iterations, manifest.load_head(self._run_dir).num_iterations)
        if not new:
            return []
        iterations = reader.read_iterations(self._run_dir, iterations=new, allow_incomplete=True)
        steps = reader.read_steps(self._run_dir, iterations=new, allow_incomplete=True)
        moments = times.of_iterations(self._run_dir, new, iterations["ended_at"])
        numbers = range(self._steps, self._steps + len(steps))
        of_steps = [moments[index] for index in steps["iteration"] - new[0]]
        self._iterations, self._steps = new.stop, numbers.stop
        return _columns(iterations, "iteration", new, moments) + _columns(steps, "step", numbers, of_steps)

    def ending(self) -> list[Scalar]:
        """The final results, accuracy and seconds; also the last point of each curve evaluated after the run."""
        recorded = manifest.load_head(self._run_dir)
        moment = times.ended(self._run_dir, recorded)
        final = {name: float(value) for name, value in recorded.final.items() if not isinstance(value, str)}
        curves = {column.name for table in manifest.tables_of(recorded) for column in table.columns} & final.keys()
        measured, spent = accuracy.read(self._run_dir, recorded), times.read(self._run_dir, recorded)
        groups = {
            "final": final,
            "accuracy": {} if measured is None else measured.numbers(),
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
        ]


def dpo_numbers(folder: Path) -> list[Scalar]:
    """The steps and results of a DPO training, all at the moment it ended: its steps have no times."""
    _, moment = dpo_records.span(folder)
    steps, final = dpo_records.read_table(folder, "dpo_steps"), dpo_records.load(folder).final
    found = _columns(steps, "step", range(len(steps)), [moment] * len(steps))
    return found + [Scalar(f"final/{n}", float(v), 0, moment) for n, v in final.items() if not isinstance(v, str)]


def _columns(table: pd.DataFrame, group: str, steps: Sequence[int], moments: Sequence[float]) -> list[Scalar]:
    """Every numeric column as `group/column`, without nulls."""
    return [
        Scalar(f"{group}/{name}", float(value), step, moment)
        for name, values in table.drop(columns=KEYS, errors="ignore").select_dtypes("number").items()
        for value, step, moment in zip(values.tolist(), steps, moments, strict=True)
        if pd.notna(value)
    ]


def sentences(folder: Path) -> list[str]:
    """The verdicts of a complete run or DPO training; of another run how far it got; and the fingerprint."""
    if dpo_records.is_dpo(folder):
        trained = dpo_records.load(folder)
        final = {name: float(value) for name, value in trained.final.items() if not isinstance(value, str)}
        return [
            f"held-out accuracy {final['accuracy_before']:.3f} -> {final['accuracy_after']:.3f} (greedy)",
            f"held-out pairs in the right order {final['margin_accuracy_before']:.3f} -> "
            f"{final['margin_accuracy_after']:.3f}",
            f"KL(policy || reference) {final['ref_kl_per_sequence']:.4f} nats per response",
            f"fingerprint {trained.fingerprint}",
        ]
    recorded = manifest.load_head(folder)
    if recorded.status != "complete":
        said = [f"{recorded.status} after {recorded.num_iterations} complete iterations"]
    elif recorded.kind == CONTROL:
        said = CONTROL_RUNS.verdicts(CONTROL_RUNS.summarise(folder, None))
    else:
        said = LANGUAGE_RUNS.verdicts(LANGUAGE_RUNS.summarise(folder, None))
    return [*said, f"fingerprint {recorded.fingerprint}"]


def promises(run_dir: Path, recorded: Head) -> dict[str, str]:
    """`holds` or `differs` by promise, over the complete iterations; empty before the first one."""
    if not recorded.num_iterations:
        return {}
    counted = reader.read_iterations(run_dir, columns=[*PROMISES], allow_incomplete=True)
    return {name: "differs" if counted[column].any() else "holds" for column, name in PROMISES.items()}
