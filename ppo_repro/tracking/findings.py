"""What a recorded run says about itself: verdicts in words, and whether each promise holds."""

from __future__ import annotations

from pathlib import Path

from ppo_repro.config.kinds import CONTROL
from ppo_repro.control.summary import CONTROL_RUNS
from ppo_repro.dpo.records import DPOManifest
from ppo_repro.records import reader
from ppo_repro.records.manifest import Head
from ppo_repro.runs.summary import LANGUAGE_RUNS

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
    if recorded.kind == CONTROL:
        return CONTROL_RUNS.verdicts(CONTROL_RUNS.summarise(run_dir, None))
    return LANGUAGE_RUNS.verdicts(LANGUAGE_RUNS.summarise(run_dir, None))


def promises(run_dir: Path, recorded: Head) -> dict[str, str]:
    """`holds` or `differs` by promise, over the complete iterations; empty where there are none."""
    if not recorded.num_iterations:
        return {}
    counted = reader.read_iterations(run_dir, columns=[*PROMISES], allow_incomplete=True)
    return {name: "differs" if counted[column].any() else "holds" for column, name in PROMISES.items()}


def dpo_sentences(recorded: DPOManifest) -> list[str]:
    """The results of a DPO training in words."""
    final = {name: float(value) for name, value in recorded.final.items() if not isinstance(value, str)}
    return [
        f"held-out accuracy {final['accuracy_before']:.3f} -> {final['accuracy_after']:.3f} (greedy)",
        f"held-out pairs in the right order {final['margin_accuracy_before']:.3f} -> "
        f"{final['margin_accuracy_after']:.3f}",
        f"KL(policy || reference) {final['ref_kl_per_sequence']:.4f} nats per response",
    ]
