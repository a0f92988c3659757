"""Language runs by the runner, with what most tests do not care about left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ppo_repro.base.clock import Clock
from ppo_repro.base.watcher import Silent, Watcher
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.runs import fork as forks
from ppo_repro.runs import rerun as again
from ppo_repro.runs import resume as resumer
from ppo_repro.runs import run as runner
from ppo_repro.runs.fork_plan import plan_fork
from ppo_repro.runs.language import LanguageKind
from tests.support.paths import SMALL, TINY

SILENT = Silent()


def run(config: RunConfig, out: Path, watcher: Watcher = SILENT) -> tuple[Path, dict[str, float]]:
    return runner.run(LanguageKind(watcher), config, out)


def tiny_run(out: Path, *overrides: str) -> Path:
    """The folder of a run of `tiny.yaml` with some fields changed."""
    return run(load_config(TINY, overrides), out)[0]


def small_run(out: Path, *overrides: str) -> Path:
    """The folder of a run of `small.yaml` with some fields changed."""
    return run(load_config(SMALL, overrides), out)[0]


def rerun(run_dir: Path, overrides: Sequence[str] = (), only: range | None = None) -> again.Rerun:
    return again.rerun(LanguageKind(SILENT), run_dir, overrides, only=only)


def resume(run_dir: Path, overrides: Sequence[str] = ()) -> resumer.Resumed:
    return resumer.resume(LanguageKind(SILENT), run_dir, overrides)


def fork(run_dir: Path, out: Path, at: int | None, *overrides: str, watcher: Watcher = SILENT) -> Path:
    plan = plan_fork(run_dir, at, overrides, out, None)
    forks.fork(LanguageKind(watcher), plan, Clock())
    return plan.folder
