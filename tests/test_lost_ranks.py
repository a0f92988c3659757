"""A process of a run that is killed, stopped or hangs: the others name it, end, and the run goes on later. Slow."""

from __future__ import annotations

import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from ppo_repro.commands.cli import _run
from ppo_repro.config.files import load_config
from ppo_repro.records import manifest
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import TINY
from tests.support.ranks import end, start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# rewards are computed by rank 0; at its 40th response it says so, and waits long enough for a signal, or for ever
REWARD = """
import os
import time
from pathlib import Path

scored, there = [0], Path(__file__).with_name("there")


def r(prompt, response, answer):
    scored[0] += 1
    if os.environ["HOW"] and scored[0] == 40:
        there.touch()
        time.sleep(10_000 if os.environ["HOW"] == "hang" else 5)
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


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "hang"])
def test_the_others_name_it_and_end_with_three(
    whole: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder, fingerprint = whole
    (folder / "there").unlink(missing_ok=True)
    monkeypatch.setenv("HOW", how)
    monkeypatch.setenv("PPO_REPRO_RANK_TIMEOUT", "45" if how == "hang" else "1800")
    # a killed one takes its pieces of the moments with it, which the checkpoint has
    mesh = ["--set", "layout.mesh={data: 2, zero: 2}", "--set", "layout.rank_shares=[2, 1]"]
    processes = start_ranks(*[[*command(folder, tmp_path), *(mesh if how == "SIGKILL" else [])]] * 2)
    while not (folder / "there").exists():
        assert processes[0].poll() is None, end(processes)
        time.sleep(0.1)
    lost, other = (0, 1) if how == "hang" else (1, 0)
    if how != "hang":
        processes[lost].send_signal(getattr(signal, how))
    processes[other].wait(200)
    processes[lost].kill()
    ended = end(processes)
    assert ended[other].code == 3, ended
    reason = {"SIGKILL": "ended without a word", "SIGSTOP": "no sign of life", "hang": "did not come within 45 s"}[how]
    said = ended[other].err.splitlines()[-1]
    assert said.startswith(f"stopped: rank {lost} (pid {processes[lost].pid} on ") and reason in said
    printed = re.search(r"go on with `ppo-repro (resume [^`]+)`, in one process$", said)
    assert printed is not None, said
    if how == "hang":
        assert f"waiting for rank 0 (pid {processes[0].pid} on " in ended[other].err, "named long before it ends"
    (run_dir,) = {path.parent for path in tmp_path.rglob("manifest.json")}
    assert 1 <= len(manifest.load(run_dir).iterations) < 5
    monkeypatch.setenv("HOW", "")
    assert _run(shlex.split(printed[1])) == 0
    assert manifest.load(run_dir).fingerprint == fingerprint
