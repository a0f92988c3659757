"""Two hundred SIGKILLs at instants drawn over the whole life of a run: nothing committed is lost, nothing half is read.

`KILLS=25 python -m pytest -m long tests/runs/test_resume_random_kills.py -s` does fewer, and prints what was hit.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ppo_repro.config.files import dump_yaml, load_config
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader
from ppo_repro.runs.run import run_folder
from ppo_repro.runs.verify import verify
from tests.support.killing import Worker, working
from tests.support.paths import TINY
from tests.support.resume import launch, require_as_uninterrupted

KILLS = int(os.environ.get("KILLS", "200"))
COLD = 20  # every so many kills one of a process that still has to start Python and import everything


@dataclass
class Expected:
    """The uninterrupted run, and how many seconds its process lived."""

    config: Path
    folder: Path
    name: Path  # of the run folder below any --out
    seconds: float


@dataclass
class Seen:
    """Where the kills found the run."""

    states: Counter[str] = field(default_factory=Counter)
    kills: int = 0

    def note(self, run_dir: Path, expected: Expected) -> None:
        """Read everything that is there: equal to the uninterrupted run so far, or refused."""
        self.kills += 1
        if not run_dir.exists():
            self.states["no folder yet"] += 1
            return
        found, whole = manifest.load(run_dir), manifest.load(expected.folder)
        count = len(found.iterations)
        assert found.iterations == whole.iterations[:count], "another record than the uninterrupted run's"
        assert found.status in ("running", "complete")
        for entry in found.iterations:
            for table in manifest.tables_of(found):
                reader.read_recorded(run_dir, found, table, entry.iteration, verify=True)
        if found.status == "running":
            with pytest.raises(UserError, match="the run is running after"):
                reader.open_manifest(run_dir)
        # a run that is killed while it writes its trained model may be without it, not with half of it
        verify(run_dir)
        half = any(path.suffix in {".tmp", ".removed"} for path in run_dir.rglob("*"))
        self.states[f"{count} recorded" + (", while it wrote" if half else "")] += 1


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[Worker, Expected]]:
    # shorter to begin with, so that more of its life is iterations and writes
    config = load_config(TINY, ["ppo.iterations=4", "checkpoints.every=1", "model.warm_start_steps=3"])
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    folder = run_folder(config, tmp_path / "whole")
    with working(f"run {path} {tmp_path / 'whole'}") as made:
        assert manifest.load(folder).status == "complete"
        started = time.perf_counter()
        assert not made.killed(math.inf, "run", path, tmp_path / "timed")
        seconds = time.perf_counter() - started
        name = folder.relative_to(tmp_path / "whole")
        require_as_uninterrupted(tmp_path / "timed" / name, folder)
        yield made, Expected(path, folder, name, seconds)


def cold_kill(run_dir: Path, out: Path, expected: Expected, generator: random.Random) -> bool:
    """Kill a process of its own, started as a user starts it, at any time of its start-up and a little after."""
    arguments = ["resume", run_dir] if run_dir.exists() else ["run", expected.config, "--out", out]
    process = launch(str(arguments[0]), *arguments[1:])
    time.sleep(generator.uniform(0.0, 8.0))
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_killed_at_any_instant(worker: tuple[Worker, Expected], tmp_path: Path) -> None:
    """Chains of kills: each run is killed, resumed and killed again until one resumption gets to the end."""
    forks, expected = worker
    generator, seen, began = random.Random(11), Seen(), time.perf_counter()
    chains, cold = 0, 0
    while seen.kills < KILLS:
        out = tmp_path / f"chain{chains}"
        run_dir = out / expected.name
        killed = True
        while killed:
            if seen.kills // COLD > cold:
                cold += 1
                killed = cold_kill(run_dir, out, expected, generator)
            else:
                words = ("resume", run_dir) if run_dir.exists() else ("run", expected.config, out)
                after = generator.uniform(0.0, expected.seconds) if seen.kills < KILLS else math.inf
                killed = forks.killed(after, *words)
            if killed:
                seen.note(run_dir, expected)
                killed = not run_dir.exists() or manifest.load(run_dir).status != "complete"  # between end and exit
        chains += 1
        require_as_uninterrupted(run_dir, expected.folder)
        verify(run_dir)
        assert [path for path in run_dir.rglob("*") if path.suffix in {".tmp", ".removed"}] == []
        shutil.rmtree(out)
    seconds = time.perf_counter() - began
    print(f"\n{seen.kills} kills ({cold} of cold processes) in {chains} runs, {seconds / seen.kills:.2f} s per kill;")
    print(f"a whole run takes {expected.seconds:.2f} s; found: {dict(sorted(seen.states.items()))}")
    assert any("while it wrote" in state for state in seen.states) or KILLS < 100
