"""What a recorded run says about itself: verdicts in words, and whether each promise holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppo_repro.config.kinds import CONTROL, DPO, LANGUAGE, Kind
from ppo_repro.control.summary import CONTROL_RUNS
from ppo_repro.preferences.dpo.summary import DPO_RUNS
from ppo_repro.records import reader
from ppo_repro.records.manifest import Head
from ppo_repro.runs.summary import LANGUAGE_RUNS, SummaryKind

SUMMARIES: dict[Kind, SummaryKind[Any]] = {LANGUAGE: LANGUAGE_RUNS, CONTROL: CONTROL_RUNS, DPO: DPO_RUNS}
# a column of `iterations` that counts disagreements -> the name of the promise
PROMISES = {
    "unequal_old_rollout_logprobs": "sampler_and_trainer_agree",
    "unequal_first_ratios": "first_ratios_are_one",
    "unequal_values": "values_agree",
}


def sentences(run_dir: Path, recorded: Head) -> list[str]:
    """The verdicts of a complete run as `show` prints them; of another one how far it got."""
    if recorded.status != "complete":
        return [f"{recorded.status} after {recorded.num_iterations} complete iterations"]
    kind = SUMMARIES[recorded.kind]
    return kind.verdicts(kind.summarise(run_dir, None))


def promises(run_dir: Path, recorded: Head) -> dict[str, str]:
    """`holds` or `differs` by promise, over the complete iterations; empty if there are none, or nothing is sampled."""
    if not recorded.num_iterations or recorded.kind == DPO:
        return {}
    counted = reader.read_iterations(run_dir, columns=[*PROMISES], allow_incomplete=True)
    return {name: "differs" if counted[column].any() else "holds" for column, name in PROMISES.items()}
