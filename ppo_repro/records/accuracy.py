"""How accurate the log-probs of a run's policy were at its start: accuracy.json. Not in the fingerprint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppo_repro.records.config_file import read_note
from ppo_repro.records.manifest import Head

FILE_NAME = "accuracy.json"
LARGEST_RATIO = 4.0  # above it the run says so


@dataclass(frozen=True)
class Accuracy:
    """Distances of log-probs from the unmodified model in float64, nats."""

    tokens: int  # scored
    deterministic_rms: float
    deterministic_max: float
    stock_rms: float  # by the unmodified model in float32
    stock_max: float
    ratio: float  # of the rms, deterministic / stock; stock counts as no better than float32 resolves

    @property
    def is_low(self) -> bool:
        """Whether the log-probs are farther from float64 than they should be."""
        return not self.ratio <= LARGEST_RATIO  # nor may the ratio be NaN


def read(run_dir: Path, recorded: Head) -> Accuracy | None:
    """What a run measured at its start, None if nothing; UserError where the file is damaged."""
    return Accuracy(**read_note(run_dir, recorded, FILE_NAME)) if FILE_NAME in recorded.notes else None


def sentence(found: Accuracy) -> str:
    """The measurement in words."""
    text = (
        f"log-probs of {found.tokens:,} tokens are {found.deterministic_rms:.2g} nats (rms) from the model in float64, "
        f"{found.deterministic_max:.2g} at most; stock float32 {found.stock_rms:.2g} and {found.stock_max:.2g}; "
        f"ratio {found.ratio:.2f}"
    )
    if not found.is_low:
        return text
    return f"{text}, above {LARGEST_RATIO:g}"
