"""A run that is killed, at any time or while it writes, resumes to the uninterrupted one; SIGTERM ends it in order."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from ppo_repro.records import manifest
from ppo_repro.watcher import Silent
from tests.support.cli import Cli
from tests.support.language import resume, run
from tests.support.paths import SMALL
from tests.support.resume import (
    OTHER_LAYOUT,
    THREADS,
    kill,
    launch,
    launch_run,
    recorded_iterations,
    require_as_uninterrupted,
    wait_until,
)
from tests.support.runs import small_config

LONG = ("ppo.iterations=24", "checkpoints.every=3")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What runs that are killed more than once have to become."""
    return run(small_config(*LONG), tmp_path_factory.mktemp("long"), Silent())[0]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capsys)


SIGTERM_AT_CALL_100 = """
import os, signal
left = [100]
def score(prompt, response, answer):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return 0.0
"""


def test_sigterm_ends_a_run_like_ctrl_c(cli: Cli, tmp_path: Path) -> None:
    # 40 held-out prompts and 48 responses are scored in the first iteration
    (tmp_path / "reward.py").write_text(SIGTERM_AT_CALL_100)
    before = signal.getsignal(signal.SIGTERM)
    try:
        code, _, err = cli(
            "run",
            SMALL,
            "--out",
            tmp_path,
            "--set",
            f"reward.terms=[{{kind: function, path: '{tmp_path}/reward.py:score'}}]",
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 143 and "Traceback" not in err
    run_dir = next(tmp_path.rglob("manifest.json")).parent
    kept = f"complete iterations are kept; go on with `ppo-repro resume {run_dir}`"
    assert err.rstrip().splitlines()[-1] == f"terminated; {kept}"
    found = manifest.load(run_dir)
    assert found.status == "interrupted" and len(found.iterations) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_killed_again_and_again_at_random_times(long_run: Path, tmp_path: Path) -> None:
    """Each process is killed within the next iterations; each one works under another layout."""
    generator = random.Random(7)
    process, run_dir = launch_run(tmp_path, *LONG)
    kills = 0
    layouts = [OTHER_LAYOUT, THREADS, ["layout.padding=none"], []]
    while kills < 4:
        before = recorded_iterations(run_dir)
        wait_until(process, lambda before=before: recorded_iterations(run_dir) > before)  # type: ignore[misc]
        time.sleep(generator.uniform(0.0, 0.7))
        kill(process)
        kills += 1
        assert manifest.load(run_dir).status == "running"
        sets = [part for override in layouts[kills % 4] for part in ("--set", override)]
        process = launch("resume", run_dir, *sets)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    require_as_uninterrupted(run_dir, long_run)
    assert len(list(run_dir.glob("resumed-*.json"))) == 4


# Python reports these events before it does what they say; the process kills itself there
AT_EVENT = """
import os, signal, sys
def watch(event, arguments):
    if event == {event!r} and {path!r} in str(arguments[{index}]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
"""
MOMENTS = [
    ("open", "records/tokens/iteration=000004.parquet.tmp", 0, 4),
    ("os.rename", "records/updates/iteration=000004.parquet", 1, 4),
    ("open", "checkpoints/reference.tmp", 0, 0),
    ("os.rename", "checkpoints/reference", 1, 0),
    ("os.mkdir", "checkpoints/iteration-000002.tmp", 0, 0),
    ("open", "iteration-000004.tmp/value_model.safetensors", 0, 2),
    ("open", "iteration-000004.tmp/checkpoint.json", 0, 2),
    ("os.rename", "checkpoints/iteration-000004", 1, 2),
    ("os.rename", "checkpoints/iteration-000002.removed", 1, 6),
    ("shutil.rmtree", "checkpoints/iteration-000002.removed", 0, 6),
    ("os.rename", "checkpoints/final", 1, 6),
]
SHORT = (
    "ppo.iterations=6", "checkpoints.every=2", "model.warm_start_steps=0",
    "rollout.prompts_per_iteration=8", "task.num_eval_prompts=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(small_config(*SHORT), tmp_path_factory.mktemp("short"), Silent())[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("event", "path", "index", "start"), MOMENTS, ids=[f"{e} {p}" for e, p, _, _ in MOMENTS])
def test_a_run_killed_while_it_writes(
    short_run: Path, tmp_path: Path, event: str, path: str, index: int, start: int
) -> None:
    before = AT_EVENT.format(event=event, path=path, index=index)
    process, run_dir = launch_run(tmp_path, *SHORT, before=before)
    process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, "it never came there"
    found = resume(run_dir, Silent(), OTHER_LAYOUT)
    assert found.start == start
    require_as_uninterrupted(run_dir, short_run)
    names = sorted(p.name for p in (run_dir / "checkpoints").iterdir())
    assert names == ["final", "iteration-000004", "iteration-000006", "reference", "value_model"]
    assert [p for p in run_dir.rglob("*") if p.suffix in {".tmp", ".removed"}] == []
