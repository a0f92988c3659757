"""Grids that really run: the same cells on every engine, failures, kills, changed code. Mostly slow."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from ppo_repro.commands.cli import _run
from ppo_repro.commands.grid import _engine as grid_engine
from ppo_repro.config.section import run_folder
from ppo_repro.errors import UserError
from ppo_repro.files import only_writer
from ppo_repro.grids import grid as grid_module
from ppo_repro.grids.cell import Order, command_of, run_of, start_cell, state_of
from ppo_repro.grids.engines import Engine, Processes
from ppo_repro.grids.grid import Outcome, run_grid
from ppo_repro.grids.progress import ConsoleGrid
from ppo_repro.grids.ray_tasks import Ray
from ppo_repro.grids.slurm import Slurm
from ppo_repro.grids.spec import load_grid
from ppo_repro.records import manifest
from tests.support.grids import fingerprints, grid_file
from tests.support.interrupts import hearing_ctrl_c
from tests.support.paths import ROOT, SMALL
from tests.support.runs import recorded_iterations

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(600)
TWO_WORKERS = Processes(2)
Four = tuple[Path, dict[str, str], Path]
Two = tuple[Path, dict[str, str]]


def finished(path: Path, out: Path, engine: Engine = TWO_WORKERS) -> Outcome:
    return run_grid(load_grid(path), out, engine, ConsoleGrid())


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Four:
    """A grid of four cells run by one worker: its file, its fingerprints, its folder."""
    folder = tmp_path_factory.mktemp("four")
    path = grid_file(folder, {"ppo.learning_rate": [1e-3, 3e-3]}, [1, 2])
    found = fingerprints(finished(path, folder / "out", Processes(1)))
    assert len(found) == len(set(found.values())) == 4
    return path, found, folder / "out" / "g"


@pytest.fixture(scope="module")
def two(four: Four, tmp_path_factory: pytest.TempPathFactory) -> Two:
    """The file of a smaller grid of which two cells are `four`'s, and their fingerprints."""
    path = grid_file(tmp_path_factory.mktemp("two"), {"ppo.learning_rate": [1e-3, 3e-3]}, [1])
    return path, {cell: found for cell, found in four[1].items() if cell.endswith("seed=1")}


@slow
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_a_cell_has_one_fingerprint_whatever_runs_it(
    four: Four, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    engines: dict[str, Engine] = {"processes": Processes(2), "ray": Ray("local", 2)}
    assert fingerprints(finished(four[0], tmp_path, engines[engine])) == four[1]


@slow
def test_calling_it_again_redoes_nothing(four: Four) -> None:
    path, found, folder = four
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("records/**/*.parquet")}
    again = finished(path, folder.parent)
    assert again.ran == () and fingerprints(again) == found and before
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("records/**/*.parquet")} == before


@slow
def test_the_tables(four: Four) -> None:
    _, found, folder = four
    cells, results = pd.read_parquet(folder / "cells.parquet"), pd.read_parquet(folder / "results.parquet")
    assert dict(zip(cells["cell"], cells["fingerprint"], strict=True)) == found
    assert cells["axis.ppo.learning_rate"].tolist() == ["0.001", "0.001", "0.003", "0.003"]
    assert cells["seed"].tolist() == [1, 2, 1, 2] and cells["code_digest"].nunique() == 1
    assert results.groupby("cell")["iteration"].apply(list).tolist() == [[0, 1]] * 4
    for row in cells.to_dict("records"):
        run_dir = folder / row["run_dir"]
        mine = results[results["cell"] == row["cell"]].reset_index(drop=True)
        parts = sorted((run_dir / "records/iterations").glob("*.parquet"))
        written = pd.concat([pd.read_parquet(p) for p in parts], ignore_index=True)
        pd.testing.assert_frame_equal(mine[written.columns], written)
        assert row["final.eval_score"] == manifest.load(run_dir).final["eval_score"]


@slow
def test_more_seeds_run_only_what_is_new(four: Four, tmp_path: Path) -> None:
    axes: dict[str, object] = {"ppo.learning_rate": [1e-3]}
    assert finished(grid_file(tmp_path, axes, [1]), tmp_path).ran == ("learning_rate=0.001,seed=1",)
    outcome = finished(grid_file(tmp_path, axes, [2, 1]), tmp_path)
    assert outcome.ran == ("learning_rate=0.001,seed=2",)
    assert fingerprints(outcome).items() <= four[1].items()
    fewer = finished(grid_file(tmp_path, axes, [2]), tmp_path)
    assert fewer.strangers == ("learning_rate=0.001,seed=1",) and len(fewer.table) == 1


@slow
def test_a_cell_that_fails_stops_no_other_and_is_tried_again(four: Four, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    (tmp_path / "r.py").write_text(
        f"from pathlib import Path\n\n\ndef r(prompt, response, answer):\n"
        f"    return 1.0 if Path({str(allowed)!r}).exists() else 1 / 0\n"
    )
    function = [{"kind": "function", "path": f"{tmp_path}/r.py:r"}]
    path = grid_file(tmp_path, {"r": {"good": {}, "bad": {"reward.terms": function}}}, [1])
    outcome = finished(path, tmp_path)
    by_cell = outcome.table.set_index("cell")
    assert by_cell["state"].to_dict() == {"r=good,seed=1": "complete", "r=bad,seed=1": "failed"}
    assert "ZeroDivisionError" in by_cell["message"]["r=bad,seed=1"]
    allowed.touch()
    again = finished(path, tmp_path)
    assert again.ran == ("r=bad,seed=1",)
    assert fingerprints(again)["r=good,seed=1"] == four[1]["learning_rate=0.001,seed=1"]


def start_grid(path: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ppo_repro", "grid", str(path), "--out", str(out), "--workers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with hearing_ctrl_c():
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


@slow
def test_a_grid_killed_twice_and_finished_is_the_same_table(two: Two, tmp_path: Path) -> None:
    for iterations in (1, 3):  # of the 4 there are
        process = start_grid(two[0], tmp_path)
        deadline = time.monotonic() + 300
        while recorded_iterations(tmp_path) < iterations:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.communicate()
        cells = [p for p in (tmp_path / "g" / "cells").iterdir() if run_of(p) is not None]
        deadline = time.monotonic() + 30
        for cell in cells:  # its process ends with the one that was killed
            run_dir = run_of(cell)
            assert run_dir is not None
            while not free(run_dir):
                assert time.monotonic() < deadline, f"{cell} is still being written"
                time.sleep(0.05)
    outcome = finished(two[0], tmp_path)
    assert outcome.ran and fingerprints(outcome) == two[1]


def free(run_dir: Path) -> bool:
    try:
        with only_writer(run_dir):
            return True
    except UserError:
        return False


@slow
def test_ctrl_c_ends_the_cells_and_keeps_what_they_did(two: Two, tmp_path: Path) -> None:
    process = start_grid(two[0], tmp_path)
    deadline = time.monotonic() + 300
    while recorded_iterations(tmp_path) < 1:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err
    states = pd.read_parquet(tmp_path / "g" / "cells.parquet")["state"]
    assert not states.isin(["running", "failed"]).any() and (states != "complete").any()
    assert fingerprints(finished(two[0], tmp_path)) == two[1]


@slow
def test_cells_of_other_code_are_not_mixed_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = grid_file(tmp_path, {}, [1])
    first = finished(path, tmp_path)
    found = fingerprints(first)
    real = grid_module.describe_environment
    monkeypatch.setattr(grid_module, "describe_environment", lambda *a: {**real(*a), "code_digest": "other"})
    with pytest.raises(UserError, match=r"seed=1: was computed with another code than now; --changed keep"):
        finished(path, tmp_path)
    kept = run_grid(load_grid(path), tmp_path, Processes(1), ConsoleGrid(), "keep")
    assert kept.ran == () and fingerprints(kept) == found
    redone = run_grid(load_grid(path), tmp_path, Processes(1), ConsoleGrid(), "redo")
    assert redone.ran == ("seed=1",) and fingerprints(redone) == found  # the code is the same after all
    monkeypatch.setattr(grid_module, "describe_environment", lambda *a: {**real(*a), "machine": "other"})
    with pytest.raises(UserError, match="another machine than now"):
        finished(path, tmp_path)


@slow
def test_a_cell_of_another_configuration_is_refused(tmp_path: Path) -> None:
    finished(grid_file(tmp_path, {}, [1]), tmp_path)
    with pytest.raises(UserError, match="was made from another configuration than the grid file has now"):
        finished(grid_file(tmp_path, {}, [1], **{"ppo.epochs": 1}), tmp_path)


def test_two_calls_on_one_folder(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    with only_writer(tmp_path / "g"), pytest.raises(UserError, match="another process is writing"):
        finished(grid_file(tmp_path, {}, [1]), tmp_path)


@slow
def test_a_cell_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    cell = load_grid(grid_file(tmp_path, {}, [1], **{"ppo.iterations": 5000})).cells[0]
    grid_module._lay_out(load_grid(tmp_path / "g.yaml"), tmp_path / "g")
    folder = tmp_path / "g" / "cells" / cell.name
    process = start_cell(Order(cell.name, str(folder), "language", 1))
    deadline = time.monotonic() + 200
    while recorded_iterations(folder) < 2:
        assert time.monotonic() < deadline and process.poll() is None, (folder / "log.txt").read_text()
        time.sleep(0.02)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 1
    assert manifest.load(run_folder(cell.config, folder)).status == "running"  # as after a kill


@slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = grid_file(tmp_path, {}, [1])
    assert _run(["grid", str(path), "--out", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"] == 1 and found["ran"] == ["seed=1"]
    (cell,) = found["cells"]
    assert cell["fingerprint"] == manifest.load(tmp_path / "out/g" / cell["run_dir"]).fingerprint


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "error: --workers 0: must be at least 1\n"),
        (["--ray", "local", "--slurm", "a=b"], "error: --ray and --slurm: choose one\n"),
        (["--slurm", "a"], "error: --slurm a: must be NAME=VALUE, for example --slurm slurm_partition=cpu\n"),
        (
            ["--slurm", "a=["],
            "error: --slurm a=[: line 1: not valid YAML: expected the node content, but found '<stream end>'\n",
        ),
    ],
)
def test_a_wrong_option_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert _run(["grid", str(grid_file(tmp_path, {}, [1])), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert capsys.readouterr().err.endswith(f"\n{said}") and not (tmp_path / "out").exists()


def test_parameters_of_jobs_have_the_types_that_submitit_wants(tmp_path: Path) -> None:
    given = argparse.Namespace(workers=3, ray=None, slurm=["timeout_min=60", "slurm_partition=cpu"])
    expected = Slurm(tmp_path / "slurm", 3, {"timeout_min": 60, "slurm_partition": "cpu"})
    assert grid_engine(given, tmp_path) == expected


def test_a_cell_without_its_manifest_is_left_as_it_is(tmp_path: Path, deterministic_run: Path) -> None:
    cell = tmp_path / "cell"
    run_dir = cell / deterministic_run.parent.name / deterministic_run.name
    shutil.copytree(deterministic_run, run_dir)
    (cell / "config.yaml").write_bytes(SMALL.read_bytes())
    kept = run_dir / manifest.FILE_NAME
    kept.rename(tmp_path / "manifest.json")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    command = [
        sys.executable,
        "-m",
        "ppo_repro.commands.grid_cells",
        "one",
        *command_of(Order("cell", str(cell), "language", 1)),
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait() == 2 and "exists without manifest.json, and nothing in it is removed" in said
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    (tmp_path / "manifest.json").rename(kept)
    assert state_of(cell) == "complete"
