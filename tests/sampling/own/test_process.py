"""The process of a user's engine ends with the run, by Ctrl-C too; several processes of a run share one engine."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from ppo_repro.config.rollout import OwnEngine
from ppo_repro.records import manifest
from ppo_repro.sampling.own.sampler import OwnProcess
from ppo_repro.sampling.responses import UncutSampling
from tests.support.language import run
from tests.support.own_engine import UNIFORM, config_of, written
from tests.support.ranks import cli_ranks
from tests.support.runs import run_below
from tests.support.waiting import require_ended

SAMPLING = UncutSampling(temperature=1.0, max_response_tokens=3, end_ids=(1,), vocab_size=10)
STARTS = """
import subprocess, time


class Engine:
    def __init__(self, pid):
        with open(pid, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "60"]).pid))

    def load(self, folder):
        pass

    def generate(self, prompts, sampling, seeds):
        time.sleep(60)
"""


def started(folder: Path, text: str, **parameters: str) -> OwnProcess:
    written(folder, text)
    return OwnProcess(OwnEngine(kind="function", path=f"{folder / 'engine.py'}:Engine", parameters=parameters))


def test_what_the_engine_started_ends_with_it(tmp_path: Path) -> None:
    engine = started(tmp_path, STARTS, pid=str(tmp_path / "pid"))
    engine.end()
    require_ended(int((tmp_path / "pid").read_text()))


def test_ctrl_c_ends_an_engine_that_hangs(tmp_path: Path) -> None:
    engine = started(tmp_path, STARTS, pid=str(tmp_path / "pid"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1]], SAMPLING, [0])
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    require_ended(int((tmp_path / "pid").read_text()))


def test_a_generator_that_nobody_seeded_follows_the_first_seed(tmp_path: Path) -> None:
    engine = started(tmp_path, UNIFORM.replace("random.Random(seed)", "random"))
    first, same, other = (engine.generate([[1]], SAMPLING, [seed]) for seed in (5, 5, 6))
    engine.end()
    assert first == same != other


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(tmp_path: Path) -> None:
    config = config_of(written(tmp_path))
    alone, _ = run(config, tmp_path / "alone")
    path = tmp_path / "run.yaml"
    path.write_text((alone / "config.yaml").read_text().replace("inputs/engine.py", str(tmp_path / "engine.py")))
    assert [ended.code for ended in cli_ranks(2, "run", path, "--out", tmp_path / "two")] == [0, 0]
    two = run_below(tmp_path / "two")
    assert manifest.load(two).fingerprint == manifest.load(alone).fingerprint
