"""A process of a run that is killed, stopped or hangs: the others name it, end, and the run goes on later. Slow."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.records import manifest
from ppo_repro.watcher import Silent
from tests.support.language import resume, run
from tests.support.paths import ROOT, TINY
from tests.support.ranks import end, start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# rank 1 stops itself in some way at its 20th response, once; the file says that it has
REWARD = """
import os
import signal
import time
from pathlib import Path
scored, first = [0], Path(__file__).with_name("stopped")


def r(prompt, response, answer):
    scored[0] += 1
    if os.environ["HOW"] and os.environ.get("RANK") == "1" and scored[0] == 20 and not first.exists():
        first.write_text(str(os.getpid()))
        HOW = os.environ["HOW"]
        if HOW == "hang":
            time.sleep(10_000)
        os.kill(os.getpid(), getattr(signal, HOW))
    return float(len(response))
"""


LONGER = ["ppo.iterations=5", "checkpoints.every=1"]


def overrides(folder: Path) -> list[str]:
    (folder / "r.py").write_text(REWARD)
    return [f"reward.terms=[{{kind: function, path: '{folder}/r.py:r'}}]", "model.warm_start_steps=4", *LONGER]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the reward, and the fingerprint of the run that nothing stopped."""
    folder = tmp_path_factory.mktemp("lost")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOW", "")
        run_dir, _ = run(load_config(TINY, overrides(folder)), folder / "whole", Silent())
    return folder, manifest.load(run_dir).fingerprint


def command(folder: Path, out: Path) -> list[str]:
    sets = [part for o in overrides(folder) for part in ("--set", o)]
    return ["-m", "ppo_repro", "run", str(TINY), "--out", str(out), *sets]


def goes_on(out: Path, fingerprint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir,) = {path.parent for path in out.rglob("manifest.json")}
    recorded = manifest.load(run_dir)
    assert recorded.status in ("interrupted", "failed") and 1 <= len(recorded.iterations) < 5
    monkeypatch.setenv("HOW", "")
    resume(run_dir, Silent())
    assert manifest.load(run_dir).fingerprint == fingerprint


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_under_torchrun(whole: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    folder, fingerprint = whole
    (folder / "stopped").unlink(missing_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, *command(folder, tmp_path)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "HOW": how}, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    pid = (folder / "stopped").read_text()
    said = [line for line in done.stderr.splitlines() if line.startswith("stopped: ")]
    assert said and all(f"stopped: rank 1 (pid {pid} on " in line for line in said), done.stderr
    assert all(re.search(r"go on with `ppo-repro resume \S+`, in one process$", line) for line in said)
    goes_on(tmp_path, fingerprint, monkeypatch)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "hang"])
def test_the_others_end_with_three(
    whole: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder, fingerprint = whole
    (folder / "stopped").unlink(missing_ok=True)
    monkeypatch.setenv("HOW", how)
    monkeypatch.setenv("PPO_REPRO_RANK_TIMEOUT", "45" if how == "hang" else "1800")
    processes = start_ranks(*[command(folder, tmp_path)] * 3)
    while not (folder / "stopped").exists():
        time.sleep(0.1)
    stopped = time.monotonic()
    for rank in (0, 2):
        processes[rank].wait(120)
    seconds = time.monotonic() - stopped
    processes[1].send_signal(signal.SIGCONT)
    if how == "SIGSTOP":
        processes[1].wait(60)
    else:
        processes[1].kill()
    ended = end(processes)
    assert [ended[0].code, ended[2].code] == [3, 3], ended
    reasons = {"SIGKILL": "ended without a word", "SIGSTOP": "has given no sign", "hang": "did not come within 45 s"}
    for process in (ended[0], ended[2]):
        assert f"stopped: rank 1 (pid {processes[1].pid} on " in process.err and reasons[how] in process.err, ended
    if how == "hang":
        assert f"waiting for rank 1 (pid {processes[1].pid} on " in ended[0].err, "named long before it ends"
    if how == "SIGSTOP":
        assert ended[1].code != 0, "it hears of it when it is continued"
    assert seconds < 100
    goes_on(tmp_path, fingerprint, monkeypatch)
