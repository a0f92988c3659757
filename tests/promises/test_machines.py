"""A run over two machines without a shared disk has the fingerprint of one process, and ends with either machine.

The machines are network namespaces with a cable between them, as `support/machines.py` makes them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ppo_repro.base.errors import RankLost
from ppo_repro.base.peers import KILLED, SILENCE
from ppo_repro.config.files import load_config
from ppo_repro.records import manifest, reader
from ppo_repro.runs.plan import plan_run
from tests.support import ranks
from tests.support.cli import PROMPTS, folder_config, sets, write_prompts
from tests.support.language import run
from tests.support.machines import NAMES, Machines, two_machines
from tests.support.paths import SMALL, TINY
from tests.support.resume import require_as_uninterrupted
from tests.support.runs import DPO, recorded_iterations, run_below
from tests.support.waiting import require_ended, until

slow = pytest.mark.slow
LONG = (pytest.mark.long, pytest.mark.timeout(3600))
pytestmark = [
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


def fingerprint_of(
    machines: Machines, each: int, folder: Path, *command: str | Path, module: str = "ppo_repro", **environment: str
) -> str:
    return str(result_of(machines, each, folder, *command, module=module, **environment)["fingerprint"])


def result_of(
    machines: Machines, each: int, folder: Path, *command: str | Path, module: str = "ppo_repro", **environment: str
) -> Any:
    """What a command on both machines prints as JSON."""
    folder.mkdir(exist_ok=True)
    processes = machines.torchrun(folder, each, *command, "--json", module=module, **environment)
    ended = [process.wait(300) for process in processes]
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


@slow
@pytest.mark.parametrize("each", [1, 2])
def test_two_machines_do_what_one_process_does(machines: Machines, config: Path, each: int, tmp_path: Path) -> None:
    alone, _ = run(load_config(config), tmp_path / "alone")
    found = fingerprint_of(machines, each, tmp_path / "two", "run", config, "--out", tmp_path / "runs")
    assert found == manifest.load(alone).fingerprint
    assert result_of(machines, each, tmp_path / "again", "rerun", run_below(tmp_path / "runs"))["identical"]


@slow
def test_machines_that_add_nothing_up_are_noticed(machines: Machines, tmp_path: Path) -> None:
    """The negative control."""
    alone, _ = run(load_config(TINY, [QUICK]), tmp_path / "alone")
    command = ("run", TINY, "--out", tmp_path / "runs", *sets(QUICK))
    module = "tests.promises.without_sums"
    assert fingerprint_of(machines, 1, tmp_path / "two", *command, module=module) != manifest.load(alone).fingerprint


@slow
def test_forks_and_preferences_need_their_run_on_one_machine_alone(machines: Machines, tmp_path: Path) -> None:
    options = "checkpoints.every=1", "ppo.iterations=2", "rollout.samples_per_prompt=4"
    source, _ = run(load_config(SMALL, options), tmp_path / "source")
    command = ("fork", source, "--at", "1", "--out", tmp_path / "forks")
    assert fingerprint_of(machines, 1, tmp_path / "fork", *command) == manifest.load(source).fingerprint
    (tmp_path / "dpo.yaml").write_text(DPO.format(run=json.dumps(str(source))))
    found = fingerprint_of(machines, 1, tmp_path / "dpo", "run", tmp_path / "dpo.yaml", "--out", tmp_path / "two")
    assert found == ranks.fingerprint_of(1, tmp_path / "dpo.yaml", tmp_path / "one")


@slow
def test_a_step_sends_what_the_plan_says(machines: Machines, tmp_path: Path) -> None:
    """Of R processes each sends (R - 1) / R of the trained bytes twice: sums of gradients, then new weights."""
    model = "model.warm_start_steps=0", "model.hidden_size=128", "model.intermediate_size=256", "ppo.iterations=1"
    counts = tmp_path / "counts"
    command = ("run", TINY, "--out", tmp_path / "runs", *sets(*model))
    fingerprint_of(machines, 1, tmp_path, *command, module="tests.promises.counted", COUNT_FILE=str(counts))
    plan = plan_run(load_config(TINY, model), 2)
    trained = [4 * model.trained for model in plan.models if model.trained]
    steps, sent = map(int, counts.read_text().split())
    of_all_models = sent / steps * len(trained)
    assert plan.sent < of_all_models < 1.05 * plan.sent
    assert of_all_models == pytest.approx(2 * (2 - 1) / 2 * sum(trained), rel=0.05)


@slow
def test_a_cut_cable_ends_both_machines_and_the_run_goes_on(machines: Machines, tmp_path: Path) -> None:
    options = (QUICK, "ppo.iterations=40", "checkpoints.every=1")
    whole, _ = run(load_config(TINY, options), tmp_path / "whole")
    runs = tmp_path / "runs"
    processes = machines.torchrun(tmp_path, 2, "run", TINY, "--out", runs, *sets(*options))
    until(lambda: recorded_iterations(runs) > 1, "two iterations", 300.0)
    with machines.cut():
        ended = [process.wait(2 * SILENCE) for process in processes]
    assert all(ended)
    stopped = [line for line in logs(tmp_path)[0].splitlines() if line.startswith("stopped: rank ")]
    assert len(stopped) == 1
    assert f" on {NAMES[1]}: {KILLED}; " in stopped[0]
    require_goes_on(machines, runs, whole, tmp_path)


def require_goes_on(machines: Machines, runs: Path, whole: Path, folder: Path) -> None:
    found = fingerprint_of(machines, 1, folder / "on", "resume", run_below(runs))
    assert found == manifest.load(whole).fingerprint
    require_as_uninterrupted(run_below(runs), whole)


@pytest.mark.parametrize("kills", [pytest.param(2, marks=slow), pytest.param(20, marks=LONG)])
def test_whichever_process_is_killed_both_machines_end_and_the_run_goes_on(
    machines: Machines, kills: int, tmp_path: Path
) -> None:
    draw, longest, options = Random(kills), 0.0, (QUICK, f"ppo.iterations={8 * kills}", "checkpoints.every=1")
    whole, _ = run(load_config(TINY, options), tmp_path / "whole")
    runs = tmp_path / "runs"
    command: tuple[str | Path, ...] = ("run", TINY, "--out", runs, *sets(*options))
    for kill in range(kills):
        (folder := tmp_path / str(kill)).mkdir()
        launchers = machines.torchrun(folder, 2, *command)
        more = recorded_iterations(runs) + draw.randrange(1, 5)
        until(lambda more=more: recorded_iterations(runs) >= more, "more iterations", 300.0)  # type: ignore[misc]
        ranks = [children(launcher.pid) for launcher in launchers]
        time.sleep(draw.uniform(0.0, 0.3))
        machine, kept = draw.randrange(2), manifest.load_head(run_below(runs)).num_iterations
        os.kill(draw.choice(ranks[machine]), signal.SIGKILL)
        began = time.monotonic()
        assert all(launcher.wait(2 * SILENCE) for launcher in launchers)
        require_ended(*ranks[0], *ranks[1])
        longest = max(longest, time.monotonic() - began)
        assert logs(folder)[1 - machine].count(f"exitcode  : {RankLost.EXIT_CODE} ") == 2, logs(folder)
        assert "exitcode  : -9 " in logs(folder)[machine]
        rows = reader.read_iterations(run_below(runs), allow_incomplete=True)
        assert rows["iteration"].tolist() == list(range(len(rows)))
        assert kept <= len(rows) < 8 * kills
        command = ("resume", run_below(runs))
    print(f"{kills} kills: every process had ended after {longest:.1f} s at most")
    assert longest < 30.0
    require_goes_on(machines, runs, whole, tmp_path)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
