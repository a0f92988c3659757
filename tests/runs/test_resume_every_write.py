"""A run killed at every change that it makes to a file, in the middle of its bytes too: it verifies, and resumes.

`STRIDE=20 python -m pytest -m long tests/runs/test_resume_every_write.py -s` takes every twentieth change.
"""

from __future__ import annotations

import math
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppo_repro.config.files import dump_yaml, load_config
from ppo_repro.records import manifest
from ppo_repro.runs.run import run_folder
from ppo_repro.runs.verify import verify
from tests.support.killing import Worker, counting_library, working
from tests.support.paths import TINY
from tests.support.resume import require_as_uninterrupted

STRIDE = int(os.environ.get("STRIDE", "1"))
SHORT = ["ppo.iterations=2", "checkpoints.every=1", "checkpoints.keep=1", "model.warm_start_steps=1"]


@dataclass
class Whole:
    """The uninterrupted run, and how many changes it makes."""

    config: Path
    folder: Path
    name: Path  # of the run folder below any --out
    changes: int


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[Worker, Whole]]:
    config = load_config(TINY, SHORT)
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    folder = run_folder(config, tmp_path / "whole")
    with working(f"run {path} {tmp_path / 'whole'}", counting_library(tmp_path)) as forks:
        changes = forks.changes("run", path, tmp_path / "counted")
        name = folder.relative_to(tmp_path / "whole")
        require_as_uninterrupted(tmp_path / "counted" / name, folder)
        yield forks, Whole(path, folder, name, changes)


def files_of(run_dir: Path) -> list[Path]:
    return sorted(path.relative_to(run_dir) for path in run_dir.rglob("*"))


def killed_at(forks: Worker, whole: Whole, out: Path, change: int, generator: random.Random) -> str:
    """Kill a run at a change, and every second time its continuation at another; then let it get to its end.

    Returns what the first kill left.
    """
    run_dir = out / whole.name
    assert forks.killed(f"at:{change}", "run", whole.config, out), "it ended before the change"
    if not run_dir.exists():
        assert list(out.rglob("manifest.json")) == [] or (run_dir.parent / (run_dir.name + ".tmp")).is_dir()
        return "no folder"
    found = verify(run_dir)
    if found.status == "running":
        assert found.iterations == len(manifest.load(run_dir).iterations)
        if change % 2 and forks.killed(f"at:{generator.randint(1, whole.changes)}", "resume", run_dir):
            verify(run_dir)
        if manifest.load_head(run_dir).status == "running":
            assert not forks.killed(math.inf, "resume", run_dir)
    require_as_uninterrupted(run_dir, whole.folder)
    assert verify(run_dir).unfinished == ()
    notes = {Path(name) for name in manifest.load_head(run_dir).notes if name.startswith("resumed-")}
    assert set(files_of(run_dir)) == set(files_of(whole.folder)) - {Path("accuracy.json")} | notes | (
        {Path("accuracy.json")} & set(files_of(run_dir))
    )
    left = "unfinished files" if found.unfinished or found.unfinished_line else "nothing unfinished"
    return f"{found.status}, {found.iterations} recorded, {left}"


def kill_all(forks: Worker, whole: Whole, out: Path, changes: range) -> Counter[str]:
    generator, seen = random.Random(3), Counter[str]()
    for change in changes:
        seen[killed_at(forks, whole, out, change, generator)] += 1
        shutil.rmtree(out, ignore_errors=True)  # the first change makes it
    print(f"\n{len(changes)} of {whole.changes} changes: {dict(sorted(seen.items()))}")
    return seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_some_changes(worker: tuple[Worker, Whole], tmp_path: Path) -> None:
    forks, whole = worker
    # every file takes at least a change to make it, one to fill it and one to name it
    assert whole.changes > 3 * len(files_of(whole.folder))
    seen = kill_all(forks, whole, tmp_path / "killed", range(60, whole.changes, whole.changes // 8))
    assert any("unfinished files" in left for left in seen) and len(seen) > 2


@pytest.mark.long
@pytest.mark.timeout(10800)
def test_killed_at_every_change(worker: tuple[Worker, Whole], tmp_path: Path) -> None:
    forks, whole = worker
    seen = kill_all(forks, whole, tmp_path / "killed", range(1, whole.changes + 1, STRIDE))
    assert {left.split(", ")[0] for left in seen} == {"no folder", "running", "complete"} or STRIDE > 1
