"""Count the fingerprints of one run under different layouts, kernels, processes and interruptions.

`python -m experiments.benchmarks.invariance` runs the five iterations of invariance.yaml once per condition, in
deterministic and in native numerics, and prints the table. Exit status 1 if deterministic numerics give more than one
fingerprint.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.base.errors import PromiseBroken
from ppo_repro.base.mode import Mode
from ppo_repro.base.watcher import Silent
from ppo_repro.config.files import load_config
from ppo_repro.config.inputs import run_folder
from ppo_repro.numerics import build, library
from ppo_repro.records import reader
from ppo_repro.runs.language import LanguageKind
from ppo_repro.runs.resume import resume
from ppo_repro.runs.run import run

CONFIG = Path(__file__).with_name("invariance.yaml")
ROOT = Path(__file__).resolve().parents[2]
MODES = ("deterministic", "native")

LAYOUTS: tuple[tuple[str, ...], ...] = (
    (),
    ("rollout_slots=1",),
    ("rollout_slots=5", "prefill_chunk=3"),
    ("prefix_cache=false",),
    ("rollout_slots=160", "prefill_chunk=1"),
    ("forward_micro_batch=1", "update_micro_batch=1"),
    ("forward_micro_batch=3", "update_micro_batch=3"),
    ("gradient_checkpointing=true", "update_micro_batch=7"),
    ("threads=2",),
    ("threads=2", "rollout_slots=5", "update_micro_batch=3"),
)
# torch and NumPy without the wider instructions of the CPU
NARROW = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX2 FMA3",
}
PROCESSES = (2, 4)


@dataclass(frozen=True)
class Outcome:
    """Result of one condition: the run's fingerprint, and its number of token rows over all epochs."""

    condition: str
    fingerprint: str
    tokens: int


def variants() -> list[str]:
    """Return the kernel variants that this CPU can run, the fastest first."""
    here, flags = build.this_platform(), frozenset(library.cpu_words("flags"))
    return [variant.name for variant in here.variants if variant.needs <= flags] if here else []


def _outcome(condition: str, run_dir: Path) -> Outcome:
    rows = len(reader.read_tokens(run_dir, columns=["rollout_logprobs"]))
    rows += len(reader.read_updates(run_dir, columns=["ratios"]))
    return Outcome(condition, reader.open_manifest(run_dir).fingerprint, rows)


def _layout(out: Path, sets: Sequence[str], layout: Sequence[str]) -> Outcome:
    overrides = [*sets, *(f"layout.{field}" for field in layout)]
    run_dir, _ = run(LanguageKind(Silent()), load_config(CONFIG, overrides), out)
    return _outcome(" ".join(layout) or "as configured", run_dir)


class _Interrupting(Silent):
    """Watcher that raises KeyboardInterrupt after the third iteration."""

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        if done == 3:
            raise KeyboardInterrupt


def _resumed(out: Path, sets: Sequence[str]) -> Outcome:
    config = load_config(CONFIG, [*sets, "checkpoints.every=2"])
    with suppress(KeyboardInterrupt):
        run(LanguageKind(_Interrupting()), config, out)
    run_dir = run_folder(config, out)
    condition = "interrupted after 3, resumed from 2 with rollout_slots=7 update_micro_batch=3"
    try:
        resume(LanguageKind(Silent()), run_dir, ["layout.rollout_slots=7", "layout.update_micro_batch=3"])
    except PromiseBroken:  # recomputed iterations differed, so the run was not resumed
        return Outcome(condition, "not the same", 0)
    return _outcome(condition, run_dir)


def _started(out: Path, sets: Sequence[str], condition: str, environment: dict[str, str], processes: int) -> Outcome:
    """Return the outcome of a run in new processes. Raises RuntimeError, with the end of the log, if the run fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), "-m", "ppo_repro", "run", str(CONFIG), "--json"]
    arguments = ["--out", str(out), *(argument for setting in sets for argument in ("--set", setting))]
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([*command, *arguments], env=everything, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{condition}: {done.stderr.strip()[-500:]}")
    return _outcome(condition, Path(json.loads(done.stdout)["run_dir"]))


def outcomes(mode: Mode, folder: Path, sets: Sequence[str] = ()) -> Iterator[Outcome]:
    """Run every condition in a numerics mode and yield the outcomes; the first condition changes nothing."""
    sets = (*sets, f"numerics.mode={mode}")
    for index, layout in enumerate(LAYOUTS):
        yield _layout(folder / f"layout{index}", sets, layout)
    yield _resumed(folder / "resumed", sets)
    for variant in variants():
        yield _started(folder / variant, sets, f"kernels {variant}", {library.CHOICE: variant}, 1)
    yield _started(folder / "narrow", sets, "torch and NumPy without wide instructions", NARROW, 1)
    for count in PROCESSES:
        yield _started(folder / f"processes{count}", sets, f"{count} processes", {}, count)


def main() -> int:
    parser = argparse.ArgumentParser(description="how many fingerprints one run has under many conditions")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as of `ppo-repro run`")
    arguments = parser.parse_args()
    failed = False
    for mode in arguments.mode:
        results = []
        with tempfile.TemporaryDirectory() as folder:
            for outcome in outcomes(mode, Path(folder), arguments.set):
                print(
                    f"{mode:<15}{outcome.fingerprint[:12]}  {outcome.tokens:>8,} tokens  {outcome.condition}",
                    flush=True,
                )
                results.append(outcome)
        distinct = len({outcome.fingerprint for outcome in results})
        compared = sum(outcome.tokens for outcome in results[1:])
        print(
            f"{mode}: {distinct} fingerprints in {len(results)} conditions, {compared:,} tokens compared with the first"
        )
        failed |= mode == "deterministic" and distinct > 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
