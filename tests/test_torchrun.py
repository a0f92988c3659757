"""The command line in several processes: under torchrun, under failures, interrupted and killed. Slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppo_repro.commands.cli import main
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader
from ppo_repro.runs.unequal import Response, first_unequal
from ppo_repro.watcher import Silent
from tests.support.interrupts import hearing_ctrl_c
from tests.support.language import run
from tests.support.paths import ROOT, SMALL, TINY
from tests.support.ranks import cli_ranks, end, start_ranks
from tests.support.runs import small_config

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(600)


def torchrun(processes: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", "ppo_repro", *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=500, check=False,
    )  # fmt: skip


def fingerprint(processes: int, config: Path, out: Path, *overrides: str) -> str:
    sets = [part for o in overrides for part in ("--set", o)]
    done = torchrun(processes, "run", config, "--out", out, "--json", *sets)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["fingerprint"])  # of one process alone: anything more is no JSON


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ppo_repro.config.files import load_config

    return run(load_config(TINY), tmp_path_factory.mktemp("tiny"), Silent())[0]


@slow
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_no_number_of_processes_changes_the_fingerprint(tiny_run: Path, tmp_path: Path, processes: int) -> None:
    assert fingerprint(processes, TINY, tmp_path) == manifest.load(tiny_run).fingerprint


@slow
def test_a_larger_run_in_another_layout(deterministic_run: Path, tmp_path: Path) -> None:
    found = fingerprint(2, SMALL, tmp_path, "layout.padding=left", "layout.rollout_slots=5")
    assert found == manifest.load(deterministic_run).fingerprint


@slow
def test_cut_distributions_travel_between_processes(tmp_path: Path) -> None:
    cuts = ("rollout.top_k=4", "rollout.top_p=0.9", "ppo.iterations=2")
    alone, _ = run(small_config(*cuts), tmp_path / "alone", Silent())
    assert fingerprint(2, SMALL, tmp_path / "two", *cuts) == manifest.load(alone).fingerprint


@slow
def test_a_rerun_in_two_processes(tiny_run: Path) -> None:
    done = torchrun(2, "rerun", tiny_run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("identical: 2 iterations, fingerprint ")
    assert len(done.stdout.splitlines()) == 1


@slow
def test_a_rerun_that_differs_ends_every_rank_with_one(native_run: Path) -> None:
    # recorded with other linear layers than these processes have
    ended = cli_ranks(2, "rerun", native_run)
    assert [e.code for e in ended] == [1, 1]
    assert ended[0].out.startswith("different: table ") and ended[1].out == ended[1].err == ""


@slow
def test_torchrun_shows_one_line_of_a_mistake(tmp_path: Path) -> None:
    done = torchrun(2, "run", TINY, "--out", tmp_path, "--set", "ppo.epochs=two")
    assert done.returncode != 0 and done.stdout == ""
    said = [line for line in done.stderr.splitlines() if "error: " in line and "ppo.epochs = 'two'" in line]
    assert len(said) == 1 and said[0].startswith(f"error: {TINY}: ")
    assert done.stderr.count("exitcode  : 2") >= 1
    assert not list(tmp_path.rglob("manifest.json"))


@slow
def test_a_mistake_of_one_rank_is_said_with_its_number(tmp_path: Path) -> None:
    good, other = ["run", str(TINY), "--out", str(tmp_path)], ["run", str(TINY), "--out", str(tmp_path)]
    ended = end(start_ranks(*[["-m", "ppo_repro", *command] for command in (good, [*other, "--set", "seed=8"])]))
    assert ended[0].code == 1 and ended[1].code == 1
    assert ended[0].errors[0].startswith("promise broken: configuration: rank 1 has ")
    assert ended[1].errors[0].startswith("rank 1: configuration: rank 1 has ")
    assert not list(tmp_path.rglob("manifest.json"))


@slow
def test_an_existing_run_is_left_alone_by_all(tiny_run: Path) -> None:
    before = (tiny_run / "manifest.json").read_bytes()
    ended = cli_ranks(2, "run", TINY, "--out", tiny_run.parents[1])
    assert [e.code for e in ended] == [2, 2]
    assert len(ended[0].errors) == 1 and "exists already" in ended[0].errors[0]
    assert (tiny_run / "manifest.json").read_bytes() == before


@slow
def test_unequal_bits_of_one_rank_end_every_rank(tmp_path: Path) -> None:
    command = ["run", str(TINY), "--out", str(tmp_path), "--set", "model.warm_start_steps=4"]
    ended = end(start_ranks(["-m", "ppo_repro", *command], ["-m", "tests.support.unequal", *command]))
    assert [e.code for e in ended] == [1, 1], ended
    # 15 responses: the first one of the second rank
    assert ended[0].errors[0].startswith("promise broken: iteration 1, response 7, token 0: rollout_logprobs ")
    run_dir = next(tmp_path.rglob("manifest.json")).parent
    recorded = manifest.load(run_dir)
    assert recorded.status == "failed" and len(recorded.iterations) == 1
    assert first_unequal(run_dir) == Response(1, 7)


def started(tmp_path: Path, *overrides: str) -> list[subprocess.Popen[str]]:
    """Two processes that have recorded two iterations of a long run."""
    sets = [part for o in ("ppo.iterations=2000", *overrides) for part in ("--set", o)]
    processes = start_ranks(*[["-m", "ppo_repro", "run", str(TINY), "--out", str(tmp_path), *sets]] * 2)
    deadline = time.monotonic() + 300
    while not list(tmp_path.rglob("iterations/iteration=000001.parquet")):
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.05)
    return processes


def status(tmp_path: Path) -> str:
    run_dir = next(tmp_path.rglob("manifest.json")).parent
    with pytest.raises(UserError, match="the run is "):
        reader.read_tokens(run_dir)
    rows = reader.read_iterations(run_dir, allow_incomplete=True)
    assert rows["iteration"].tolist() == list(range(len(rows))) and len(rows) >= 1
    return manifest.load(run_dir).status


@slow
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    processes = started(tmp_path)
    processes[1].kill()
    ended = end(processes)
    assert ended[0].code == 3 and len(ended[0].errors) == 1, ended
    assert ended[0].errors[0].startswith("stopped: another process of this run ended (")
    assert status(tmp_path) == "interrupted"


@slow
def test_torchrun_passes_on_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["-m", "ppo_repro", "run", str(TINY), "--out", str(tmp_path), "--set", "ppo.iterations=2000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with hearing_ctrl_c():
        process = subprocess.Popen([*command, *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not list(tmp_path.rglob("iterations/iteration=000001.parquet")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err.count("interrupted; complete iterations are kept") == 1
    assert status(tmp_path) == "interrupted"


@pytest.mark.parametrize("command", [["show", "."], ["probe", str(TINY)], ["diff", ".", "."], ["track", "."]])
def test_other_commands_refuse_several_processes(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, said in ((0, "error: only run, rerun and resume work in several processes; start this command"), (1, "")):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(sys, "argv", ["ppo-repro", *command])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith(said) and len(err.splitlines()) == bool(said)


@pytest.mark.parametrize(
    ("size", "rank", "said"),
    [
        ("3", "0", "torchrun --nproc-per-node: 3 processes were started; a run takes 1, 2, 4 or 8"),
        ("two", "0", "environment variable WORLD_SIZE = 'two': must be a count, as torchrun sets it"),
        ("2", "2", "environment variable RANK = 2: must be below WORLD_SIZE = 2, as torchrun sets it"),
        ("2", "x", "environment variable RANK = 'x': must be a count, as torchrun sets it"),
    ],
)
def test_a_malformed_environment_is_one_line(
    size: str, rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["ppo-repro", "run", str(TINY)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {said}\n"
