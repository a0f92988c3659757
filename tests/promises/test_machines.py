"""A run over two machines without a shared disk has the fingerprint of one process, and ends with either machine.

The machines are network namespaces with a cable between them, as `support/machines.py` makes them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.base.errors import RankLost
from ppo_repro.base.peers import KILLED, SILENCE
from ppo_repro.config.files import load_config
from ppo_repro.records import manifest
from tests.support import ranks
from tests.support.cli import PROMPTS, folder_config, sets, write_prompts
from tests.support.language import run
from tests.support.machines import NAMES, Machines, two_machines
from tests.support.paths import SMALL, TINY
from tests.support.resume import require_as_uninterrupted
from tests.support.runs import DPO, recorded_iterations, run_below
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root, and ip"),
]
QUICK = "model.warm_start_steps=4"
REWARD = "from words import length\n\ndef shorter(prompt, response, answer):\n    return -length(response)\n"


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with two_machines() as found:
        yield found


def logs(folder: Path) -> tuple[str, str]:
    first, second = ((folder / f"{name}.log").read_text() for name in NAMES)
    return first, second


def fingerprint_of(machines: Machines, each: int, folder: Path, *command: str | Path, module: str = "ppo_repro") -> str:
    return str(result_of(machines, each, folder, *command, module=module)["fingerprint"])


def result_of(machines: Machines, each: int, folder: Path, *command: str | Path, module: str = "ppo_repro") -> Any:
    """What a command on both machines prints as JSON."""
    folder.mkdir(exist_ok=True)
    ended = [process.wait(300) for process in machines.torchrun(folder, each, *command, "--json", module=module)]
    first, second = logs(folder)
    assert ended == [0, 0], first + second
    (line,) = (line for line in first.splitlines() if line.startswith("{"))
    return json.loads(line)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, deterministic_run: Path) -> Path:
    """A configuration with files of every kind, none of which the second machine has."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "reward.py").write_text(REWARD)
    (folder / "words.py").write_text("def length(text):\n    return len(text.split())\n")
    policy = Path(shutil.copytree(deterministic_run / "checkpoints" / "final", folder / "policy"))
    prompts = write_prompts(folder / "prompts.jsonl", *PROMPTS)
    return folder_config(folder / "run.yaml", policy, prompts, f"{folder}/reward.py:shorter")


@pytest.mark.parametrize("each", [1, 2])
def test_two_machines_do_what_one_process_does(machines: Machines, config: Path, each: int, tmp_path: Path) -> None:
    alone, _ = run(load_config(config), tmp_path / "alone")
    found = fingerprint_of(machines, each, tmp_path / "two", "run", config, "--out", tmp_path / "runs")
    assert found == manifest.load(alone).fingerprint
    assert result_of(machines, each, tmp_path / "again", "rerun", run_below(tmp_path / "runs"))["identical"]


def test_machines_that_add_nothing_up_are_noticed(machines: Machines, tmp_path: Path) -> None:
    """The negative control."""
    alone, _ = run(load_config(TINY, [QUICK]), tmp_path / "alone")
    command = ("run", TINY, "--out", tmp_path / "runs", *sets(QUICK))
    module = "tests.promises.without_sums"
    assert fingerprint_of(machines, 1, tmp_path / "two", *command, module=module) != manifest.load(alone).fingerprint


def test_forks_and_preferences_need_their_run_on_one_machine_alone(machines: Machines, tmp_path: Path) -> None:
    options = "checkpoints.every=1", "ppo.iterations=2", "rollout.samples_per_prompt=4"
    source, _ = run(load_config(SMALL, options), tmp_path / "source")
    command = ("fork", source, "--at", "1", "--out", tmp_path / "forks")
    assert fingerprint_of(machines, 1, tmp_path / "fork", *command) == manifest.load(source).fingerprint
    (tmp_path / "dpo.yaml").write_text(DPO.format(run=json.dumps(str(source))))
    found = fingerprint_of(machines, 1, tmp_path / "dpo", "run", tmp_path / "dpo.yaml", "--out", tmp_path / "two")
    assert found == ranks.fingerprint_of(1, tmp_path / "dpo.yaml", tmp_path / "one")


@pytest.mark.parametrize("how", ["killed", "interrupted", "cut"])
def test_a_lost_machine_ends_the_other_and_the_run_goes_on(machines: Machines, how: str, tmp_path: Path) -> None:
    options = (QUICK, "ppo.iterations=40", "checkpoints.every=1")
    whole, _ = run(load_config(TINY, options), tmp_path / "whole")
    runs = tmp_path / "runs"
    processes = machines.torchrun(tmp_path, 2, "run", TINY, "--out", runs, *sets(*options))
    until(lambda: recorded_iterations(runs) > 1, "two iterations", 300.0)
    if how == "cut":
        with machines.cut():
            ended = [process.wait(2 * SILENCE) for process in processes]
    else:
        (rank, *_) = map(int, Path(f"/proc/{processes[1].pid}/task/{processes[1].pid}/children").read_text().split())
        os.kill(rank, signal.SIGKILL if how == "killed" else signal.SIGINT)
        ended = [process.wait(2 * SILENCE) for process in processes]
    assert all(ended)
    stopped = [line for line in logs(tmp_path)[0].splitlines() if line.startswith("stopped: rank ")]
    assert len(stopped) == 1
    assert f" on {NAMES[1]}: {'interrupted' if how == 'interrupted' else KILLED}; " in stopped[0]
    assert f"exitcode  : {RankLost.EXIT_CODE}" in logs(tmp_path)[0]
    assert manifest.load(run_below(runs)).status == "interrupted"
    found = fingerprint_of(machines, 1, tmp_path / "on", "resume", run_below(runs))
    assert found == manifest.load(whole).fingerprint
    require_as_uninterrupted(run_below(runs), whole)
