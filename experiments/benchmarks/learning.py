"""Do deterministic numerics learn as well as native ones? The quickstart from the same weights, over seeds.

`python -m experiments.benchmarks.learning` prints held-out accuracy and the mean score of the last ten
iterations for each seed and mode, and the paired difference with a 95 % Student interval.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from statistics import mean, stdev

from scipy.stats import t as student

from ppo_repro.config.files import load_config
from ppo_repro.records import reader
from ppo_repro.runs.language import LanguageKind
from ppo_repro.runs.run import run
from ppo_repro.watcher import Silent

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
LAST = 10  # iterations


def warm_started(seed: int, out: Path) -> Path:
    """Folder of the policy after the quickstart's warm start, from which both modes continue."""
    still = ["ppo.iterations=1", "ppo.learning_rate=0", "value.learning_rate=0"]
    run_dir, _ = run(LanguageKind(Silent()), load_config(QUICKSTART, [f"seed={seed}", *still]), out)
    return run_dir / "checkpoints" / "final"


def learnt(seed: int, mode: str, policy: Path, out: Path) -> tuple[float, float, float, float]:
    """(accuracy before, accuracy after, mean score of the last iterations, wall seconds) of one run."""
    overrides = [f"seed={seed}", f"numerics.mode={mode}", f"model={{kind: folder, path: '{policy}'}}"]
    run_dir, seconds = run(LanguageKind(Silent()), load_config(QUICKSTART, overrides), out)
    iterations = reader.read_iterations(run_dir)
    after = float(reader.open_manifest(run_dir).final["eval_accuracy"])
    before = float(iterations["eval_accuracy"].iloc[0])
    return before, after, float(iterations["score_mean"].tail(LAST).mean()), seconds["total"]


def interval(differences: list[float]) -> tuple[float, float, float]:
    """Mean and 95 % Student interval of paired differences."""
    centre = mean(differences)
    half = student.ppf(0.975, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return centre, centre - half, centre + half


def main() -> None:
    parser = argparse.ArgumentParser(description="learning in deterministic and native numerics, paired by seed")
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            policy = warm_started(seed, Path(folder))
            for mode in ("deterministic", "native"):
                before, after, score, seconds = results[seed, mode] = learnt(seed, mode, policy, Path(folder))
                print(
                    f"seed {seed} {mode:<13} accuracy {before:.3f} -> {after:.3f}, "
                    f"score of the last {LAST} iterations {score:.3f}, {seconds:.0f} s",
                    flush=True,
                )
    for name, column in (("accuracy after", 1), (f"score of the last {LAST}", 2)):
        centre, low, high = interval(
            [results[s, "deterministic"][column] - results[s, "native"][column] for s in seeds]
        )
        print(f"{name}: deterministic - native = {centre:+.4f}, 95 % [{low:+.4f}, {high:+.4f}], {len(seeds)} seeds")


if __name__ == "__main__":
    main()
