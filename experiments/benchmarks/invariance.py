"""How many fingerprints has one run under different layouts, instruction sets, processes, interruptions?

`python -m experiments.benchmarks.invariance` runs the five iterations of invariance.yaml once per condition, in
exact and in native numerics, and prints the table. Exit status 1 if exact numerics give more than one fingerprint.
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

from ppo_repro.config.files import load_config
from ppo_repro.errors import PromiseBroken
from ppo_repro.records import reader
from ppo_repro.runs.language import LanguageKind
from ppo_repro.runs.run import resume, run, run_folder
from ppo_repro.watcher import Silent

CONFIG = Path(__file__).with_name("invariance.yaml")
ROOT = Path(__file__).resolve().parents[2]

LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("rollout_slots=1",),
    ("rollout_slots=5", "prefill_chunk=3"),
    ("rollout_slots=32", "prefix_cache=false"),
    ("rollout_slots=160", "prefill_chunk=1", "prefix_cache=true"),
    ("forward_micro_batch=1", "update_micro_batch=1", "padding=left"),
    ("forward_micro_batch=3", "update_micro_batch=3", "padding=none"),
    ("padding=left",),
    ("padding=none",),
    ("gradient_checkpointing=true", "update_micro_batch=7"),
    ("threads=2",),
    ("threads=2", "padding=none", "rollout_slots=5", "update_micro_batch=3"),
)
# each disables instructions in torch, MKL or NumPy
CAPS: tuple[dict[str, str], ...] = (
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX2 FMA3"},
)
RANKS = (2, 4, 8)


@dataclass(frozen=True)
class Outcome:
    """One condition: the fingerprint of the run, and its rows of tokens including those of every epoch."""

    condition: str
    fingerprint: str
    tokens: int


def _outcome(condition: str, run_dir: Path) -> Outcome:
    rows = len(reader.read_tokens(run_dir, columns=["rollout_logprobs"]))
    rows += len(reader.read_updates(run_dir, columns=["ratios"]))
    return Outcome(condition, reader.open_manifest(run_dir).fingerprint, rows)


def _layout(out: Path, numerics: Sequence[str], layout: Sequence[str]) -> Outcome:
    overrides = [*numerics, *(f"layout.{field}" for field in layout)]
    run_dir, _ = run(LanguageKind(Silent()), load_config(CONFIG, overrides), out)
    return _outcome(" ".join(layout) or "as configured", run_dir)


class _Interrupting(Silent):
    """Ctrl-C after the third iteration."""

    def iteration(self, done: int, total: int, figures: str) -> None:
        if done == 3:
            raise KeyboardInterrupt


def _resumed(out: Path, numerics: Sequence[str]) -> Outcome:
    config = load_config(CONFIG, [*numerics, "checkpoints.every=2"])
    with suppress(KeyboardInterrupt):
        run(LanguageKind(_Interrupting()), config, out)
    run_dir = run_folder(config, out)
    condition = "interrupted after 3, resumed from 2, padding=left rollout_slots=7"
    try:
        resume(LanguageKind(Silent()), run_dir, ["layout.padding=left", "layout.rollout_slots=7"])
    except PromiseBroken:  # recomputed iterations differed, so the run was not resumed
        return Outcome(condition, "not the same", 0)
    return _outcome(condition, run_dir)


def _process(out: Path, numerics: Sequence[str], condition: str, environment: dict[str, str], ranks: int) -> Outcome:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "ppo_repro", "run", str(CONFIG), "--out", str(out), "--json"]
    sets = [argument for setting in numerics for argument in ("--set", setting)]
    done = subprocess.run(
        [*command, *sets],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode:
        raise RuntimeError(f"{condition}: {done.stderr.strip()[-500:]}")
    return _outcome(condition, Path(json.loads(done.stdout)["run_dir"]))


def outcomes(mode: str, folder: Path) -> Iterator[Outcome]:
    """Run every condition of a numerics mode."""
    numerics = (f"numerics.mode={mode}",)
    layouts: list[tuple[str, ...]] = [(), *LAYOUTS]
    for index, layout in enumerate(layouts):
        yield _layout(folder / f"layout{index}", numerics, layout)
    yield _resumed(folder / "resumed", numerics)
    for index, cap in enumerate(CAPS):
        condition = " ".join(f"{name}={value}" for name, value in cap.items())
        yield _process(folder / f"cap{index}", numerics, condition, cap, 1)
    for ranks in RANKS:
        yield _process(folder / f"ranks{ranks}", numerics, f"{ranks} processes", {}, ranks)


def main() -> int:
    parser = argparse.ArgumentParser(description="how many fingerprints one run has under many conditions")
    parser.add_argument("--mode", nargs="+", choices=["exact", "native"], default=["exact", "native"])
    arguments = parser.parse_args()
    failed = False
    for mode in arguments.mode:
        with tempfile.TemporaryDirectory() as folder:
            results = []
            for outcome in outcomes(mode, Path(folder)):
                print(
                    f"{mode:<8}{outcome.fingerprint[:12]}  {outcome.tokens:>8,} tokens  {outcome.condition}", flush=True
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
