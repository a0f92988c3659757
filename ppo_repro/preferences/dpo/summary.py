"""What a finished DPO run says about itself, computed from its records alone; never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppo_repro.records import reader, times
from ppo_repro.runs.summary import SummaryKind


@dataclass(frozen=True)
class DPOSummary:
    """The figures of one DPO run."""

    run_dir: str
    fingerprint: str
    status: str
    iterations: int  # epochs
    tokens: int  # pairs of all epochs
    steps: int
    loss_first: float  # nats, mean over the pairs of a minibatch
    loss_last: float
    eval_pairs: int
    eval_pair_accuracy: float
    accuracy_before: float | None  # greedy; None if there is no run with a task
    accuracy_after: float | None
    ref_kl_per_sequence: float | None  # nats
    seconds: dict[str, float]  # by phase


def summarise(run_dir: Path, seconds: dict[str, float] | None = None) -> DPOSummary:
    """Summary of a complete DPO run; `seconds` replaces the phases found in the records."""
    recorded = reader.open_manifest(run_dir)
    rows, steps = reader.read_iterations(run_dir), reader.read_steps(run_dir)
    held_out = reader.TableReader("margins")(run_dir, iterations=[0], columns=["held_out"])["held_out"]
    has_task = "eval_accuracy" in recorded.final
    return DPOSummary(
        run_dir=str(run_dir),
        fingerprint=recorded.fingerprint,
        status=recorded.status,
        iterations=len(rows),
        tokens=int(rows["pairs"].sum()),
        steps=len(steps),
        loss_first=float(steps["loss"].iloc[0]),
        loss_last=float(steps["loss"].iloc[-1]),
        eval_pairs=int(held_out.sum()),
        eval_pair_accuracy=float(rows["eval_pair_accuracy"].iloc[-1]),
        accuracy_before=float(rows["eval_accuracy"].iloc[0]) if has_task else None,
        accuracy_after=float(recorded.final["eval_accuracy"]) if has_task else None,
        ref_kl_per_sequence=float(recorded.final["ref_kl_per_sequence"]) if has_task else None,
        seconds=times.by_phase(run_dir, recorded, times.phases_of(rows)) if seconds is None else seconds,
    )


def _verdicts(summary: DPOSummary) -> list[str]:
    s = summary
    lines = [
        f"held-out pairs in the right order 0.500 -> {s.eval_pair_accuracy:.3f} ({s.eval_pairs:,} pairs)",
        f"loss {s.loss_first:.4f} -> {s.loss_last:.4f} nats, {s.tokens // s.iterations:,} pairs, "
        f"{s.iterations} epochs, {s.steps} steps",
    ]
    if s.accuracy_before is not None:
        lines.insert(0, f"held-out accuracy {s.accuracy_before:.3f} -> {s.accuracy_after:.3f} (greedy)")
        lines.append(f"KL(policy || reference) {s.ref_kl_per_sequence:.4f} nats per response")
    return lines


DPO_RUNS: SummaryKind[DPOSummary] = SummaryKind(
    columns=("iteration", "pairs", "loss", "margin", "eval_margin", "eval_pair_accuracy", "eval_accuracy"),
    unit="pairs",
    summarise=summarise,
    verdicts=_verdicts,
)
