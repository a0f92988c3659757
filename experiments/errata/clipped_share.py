"""Is "10-40 % clipped" a sign of good training? The quickstart over clip ranges and learning rates.

`python -m experiments.errata.clipped_share` trains the same warm-started policy in each cell. It prints the share of
ratios outside the band (on both sides, as the rule counts), the share whose gradient the clip removed, and the
accuracy.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.benchmarks.learning import warm_started
from ppo_repro.config.files import load_config
from ppo_repro.records import reader
from ppo_repro.runs.language import LanguageKind
from ppo_repro.runs.run import run
from ppo_repro.watcher import Silent

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
CLIP_RANGES = (0.02, 0.1, 0.2, 0.5)
LEARNING_RATES = (3e-4, 1e-3, 3e-3)


@dataclass(frozen=True)
class Cell:
    """One run."""

    clip_range: float
    learning_rate: float
    outside: float  # |ratio - 1| > clip_range, all tokens of all epochs
    removed: float  # gradient zero
    accuracy: float  # greedy, on held-out prompts, after training


def measure(policy: Path, clip_range: float, learning_rate: float, iterations: int, out: Path) -> Cell:
    """Train in one cell of the grid and read the shares from the records."""
    overrides = [
        f"model={{kind: folder, path: '{policy}'}}",
        f"ppo.objective.clip_range={clip_range}",
        f"ppo.learning_rate={learning_rate}",
        f"ppo.iterations={iterations}",
    ]
    run_dir, _ = run(LanguageKind(Silent()), load_config(QUICKSTART, overrides), out)
    updates = reader.read_updates(run_dir, columns=["ratios", "clip_flag"])
    outside = float(np.mean(np.abs(updates["ratios"] - 1.0) > clip_range))
    removed = float(updates["clip_flag"].str.startswith("clip_").mean())
    accuracy = float(reader.open_manifest(run_dir).final["eval_accuracy"])
    return Cell(clip_range, learning_rate, outside, removed, accuracy)


def verdict(share: float) -> str:
    """What the rule says about a share."""
    if share < 0.05:
        return "epsilon too large"
    if share > 0.6:
        return "epsilon too small"
    return "good" if 0.1 <= share <= 0.4 else "says nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description="clipped share against accuracy")
    parser.add_argument("--iterations", type=int, default=40)
    iterations = parser.parse_args().iterations
    with tempfile.TemporaryDirectory() as folder:
        policy = warm_started(0, Path(folder))
        print("| clip range | learning rate | outside the band | gradient removed | the rule says | accuracy |")
        print("|---|---|---|---|---|---|")
        for learning_rate in LEARNING_RATES:
            for clip_range in CLIP_RANGES:
                c = measure(policy, clip_range, learning_rate, iterations, Path(folder))
                shares = f"{c.outside:.1%} | {c.removed:.1%} | {verdict(c.outside)}"
                print(f"| {c.clip_range} | {c.learning_rate:g} | {shares} | {c.accuracy:.3f} |", flush=True)


if __name__ == "__main__":
    main()
