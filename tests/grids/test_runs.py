"""Grids that really run: the same cells on every executor, failures, kills, changed code. Mostly slow."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from ray.cluster_utils import Cluster

from ppo_repro.base.errors import UserError
from ppo_repro.base.lock import has_writer, only_writer
from ppo_repro.grids import grid as grid_module
from ppo_repro.grids.cell import Order, cell_state, finish_cell, record_result, run_of, start_cell
from ppo_repro.grids.executor import Executor, Processes, Results
from ppo_repro.grids.grid import Outcome, lines, run_grid
from ppo_repro.grids.ray_and_slurm import Ray
from ppo_repro.grids.spec import Cell, load_grid
from ppo_repro.records import manifest, reader
from ppo_repro.records.folder import load_any_recorded_config
from ppo_repro.runs import environment
from tests.grids.small_grids import fingerprints, grid_file, written_grid
from tests.support.cli import Cli
from tests.support.interrupts import started
from tests.support.language import run
from tests.support.paths import SMALL_CONTROL
from tests.support.resume import Stopped
from tests.support.runs import recorded_iterations
from tests.support.waiting import until

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(600)
TWO_WORKERS = Processes(2)
Grid = tuple[Path, dict[str, str], Path]


def finished(path: Path, out: Path, executor: Executor = TWO_WORKERS, keep_changed: bool = False) -> Outcome:
    return run_grid(load_grid(path), out, executor, keep_changed)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """A grid of four cells run by one worker: its file, its fingerprints, its folder."""
    folder = tmp_path_factory.mktemp("four")
    path = grid_file(folder, {"ppo.learning_rate": [1e-3, 3e-3]}, [1, 2])
    found = fingerprints(finished(path, folder / "out", Processes(1)))
    assert len(found) == len(set(found.values())) == 4
    return path, found, folder / "out" / "g"


@slow
def test_cells_of_two_processes_on_two_nodes_of_ray_have_the_fingerprints_of_one(
    four: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    path = grid_file(tmp_path, {"ppo.learning_rate": [1e-3]}, [1, 2])
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=2)
        outcome = run_grid(load_grid(path), tmp_path, Ray(nodes.address, 2), processes=2)
    finally:
        nodes.shutdown()
    found = fingerprints(outcome)
    assert found == {cell: four[1][cell] for cell in found}
    environments = [tmp_path / "g" / run_dir / "environment.json" for run_dir in outcome.table["run_dir"]]
    assert [json.loads(path.read_text())["processes"] for path in environments] == [2, 2]


@slow
def test_a_second_call_repeats_nothing_and_the_tables_are_the_records(
    four: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found, folder = four
    digests: list[str] = []
    real = environment.code_digest
    monkeypatch.setattr(environment, "code_digest", lambda: digests.append(real()) or digests[-1])
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("records/**/*.parquet")}
    assert finished(path, folder.parent).ran == ()
    assert len(digests) == 1, "the code is read once, not for each cell"
    assert before
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("records/**/*.parquet")} == before
    cells, results = pd.read_parquet(folder / "cells.parquet"), pd.read_parquet(folder / "results.parquet")
    assert dict(zip(cells["cell"], cells["fingerprint"], strict=True)) == found
    assert cells["axis.ppo.learning_rate"].tolist() == ["0.001", "0.001", "0.003", "0.003"]
    assert cells["seed"].tolist() == [1, 2, 1, 2]
    assert cells["code_digest"].nunique() == 1
    for row in cells.to_dict("records"):
        mine = results[results["cell"] == row["cell"]].reset_index(drop=True)
        written = reader.read_iterations(folder / row["run_dir"])
        pd.testing.assert_frame_equal(mine[written.columns], written)
        assert row["final.eval_score"] == manifest.load(folder / row["run_dir"]).final["eval_score"]


@slow
def test_a_cell_that_fails_stops_no_other_and_no_cell_changes_another(tmp_path: Path) -> None:
    """Each reward leaves its name in modules of the process, and scores less if it meets another name there."""
    (tmp_path / "r.py").write_text(
        "import math, os, torch\nfrom pathlib import Path\n\n\ndef mark(name):\n"
        "    return [module.__dict__.setdefault('cell', name) for module in (math, torch)].count(name)\n\n\n"
        f"def ends(prompt, response, answer):\n    mark('ends')\n"
        f"    return 1.0 if Path({str(tmp_path / 'allowed')!r}).exists() else 1 / 0\n\n\n"
        "def first(prompt, response, answer):\n    return len(response) + mark('first')\n\n\n"
        "def second(prompt, response, answer):\n    return len(response) + mark('second')\n"
    )
    terms = {name: [{"kind": "function", "path": f"{tmp_path}/r.py:{name}"}] for name in ("ends", "first", "second")}
    axes: dict[str, object] = {"r": {name: {"reward.terms": term} for name, term in terms.items()}}
    path = grid_file(tmp_path, axes, [1], **{"ppo.iterations": 1})
    table = finished(path, tmp_path / "out", Processes(1)).table
    assert table["state"].tolist() == ["failed", "complete", "complete"]
    assert "ZeroDivisionError" in table["message"][0]
    for run_dir in table["run_dir"][1:]:
        rows = reader.read_sequences(tmp_path / "out" / "g" / run_dir)
        assert (rows["scores"] == rows["response"].str.len() + 2).all()
    (tmp_path / "allowed").touch()
    again = finished(path, tmp_path / "out")
    assert again.ran == ("r=ends,seed=1",)
    assert (again.table["state"] == "complete").all()


@slow
def test_a_grid_killed_twice_and_then_interrupted_is_finished_as_if_nothing_was(four: Grid, tmp_path: Path) -> None:
    path = grid_file(tmp_path, {"ppo.learning_rate": [1e-3, 3e-3]}, [1])
    for iterations, number in ((1, signal.SIGKILL), (2, signal.SIGKILL), (3, signal.SIGINT)):  # of the 4 there are
        so_far = max(iterations, recorded_iterations(tmp_path) + 1)  # one more: the new process listens to signals
        process = started("grid", path, "--out", tmp_path, "--workers", "2")
        until(lambda p=process, n=so_far: p.poll() is not None or recorded_iterations(tmp_path) >= n, "iterations")  # type: ignore[misc]
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        runs = [run for cell in (tmp_path / "g" / "cells").iterdir() if (run := run_of(cell))]
        until(lambda these=runs: not any(has_writer(run) for run in these), "the end of the cells")  # type: ignore[misc]
        if number == signal.SIGINT and process.returncode != 0:
            assert process.returncode == 130
            assert "Traceback" not in err
            assert not pd.read_parquet(tmp_path / "g" / "cells.parquet")["state"].isin(["running", "failed"]).any()
    found = fingerprints(finished(path, tmp_path))
    assert found == {cell: fingerprint for cell, fingerprint in four[1].items() if cell.endswith("seed=1")}


@slow
def test_cells_of_other_code_are_not_mixed_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = grid_file(tmp_path, {}, [1])
    found = fingerprints(finished(path, tmp_path))
    real = grid_module.describe_environment
    monkeypatch.setattr(grid_module, "describe_environment", lambda *a: {**real(*a), "code_digest": "other"})
    with pytest.raises(UserError, match=r"seed=1: was computed with another code_digest than now; --keep-changed"):
        finished(path, tmp_path)
    kept = finished(path, tmp_path, keep_changed=True)
    assert kept.ran == ()
    assert fingerprints(kept) == found
    read = grid_module.read_environments
    monkeypatch.setattr(grid_module, "describe_environment", real)
    # begun by the code of today, and resumed by another one
    monkeypatch.setattr(grid_module, "read_environments", lambda *a: [*read(*a), {**read(*a)[0], "python": "other"}])
    with pytest.raises(UserError, match="another python than now"):
        finished(path, tmp_path)


@pytest.mark.parametrize("which", ["deterministic_run", "native_run", "control_run"])
def test_another_machine_matters_where_results_are_not_the_same_everywhere(
    which: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = shutil.copytree(request.getfixturevalue(which), tmp_path / "cell" / "name" / "run")
    config, real = load_any_recorded_config(run_dir, manifest.load_head(run_dir)), grid_module.describe_environment
    cell = Cell("seed=1", {}, config.seed, config)
    code = environment.describe_code()
    grid_module.check_unchanged(cell, tmp_path / "cell", code)
    for name in grid_module.OF_MACHINE:
        monkeypatch.setattr(grid_module, "describe_environment", lambda *a, n=name: {**real(*a), n: "other"})
        if which == "deterministic_run":
            grid_module.check_unchanged(cell, tmp_path / "cell", code)
            continue
        with pytest.raises(UserError, match=f"was computed with another {name} than now; --keep-changed"):
            grid_module.check_unchanged(cell, tmp_path / "cell", code)


class Failing:
    """An executor whose cells fail; it reads the table of cells after each one."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, list[list[str]]()

    def check(self) -> None: ...

    def run(self, orders: Sequence[Order]) -> Results:
        for order in orders:
            yield record_result(order, 2, "error: as meant")
            self.seen.append(pd.read_parquet(self.path)["state"].tolist())


class Damaging(Failing):
    """Leaves the first cell without a readable manifest."""

    def run(self, orders: Sequence[Order]) -> Results:
        folder = Path(orders[0].folder) / "a" / "run"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{")
        yield from super().run(orders)


def test_a_cell_that_cannot_be_read_stops_no_other(tmp_path: Path) -> None:
    executor = Damaging(tmp_path / "g" / "cells.parquet")
    with pytest.raises(UserError, match=r"manifest\.json"):
        finished(grid_file(tmp_path, {}, [1, 2]), tmp_path, executor)
    assert executor.seen == [["missing", "missing"], ["missing", "failed"]]


def test_the_table_of_cells_has_a_cell_when_it_ends(tmp_path: Path) -> None:
    executor = Failing(tmp_path / "g" / "cells.parquet")
    table = finished(grid_file(tmp_path, {}, [1, 2]), tmp_path, executor).table
    assert executor.seen == [["failed", "missing"], ["failed", "failed"]]
    assert table["message"].tolist() == ["error: as meant"] * 2


def test_a_refused_call_changes_no_file(tmp_path: Path) -> None:
    executor = Failing(tmp_path / "g" / "cells.parquet")
    finished(grid_file(tmp_path, {}, [1]), tmp_path, executor)
    before = {path: path.read_bytes() for path in (tmp_path / "g").rglob("*.*")}
    with pytest.raises(UserError, match="seed=1: was made from another configuration"):
        finished(grid_file(tmp_path, {}, [2, 1], **{"ppo.weight_decay": 0.5}), tmp_path, executor)
    assert {path: path.read_bytes() for path in (tmp_path / "g").rglob("*.*")} == before


@slow
def test_a_cell_whose_reward_was_edited_is_refused_or_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, response, answer):\n    return float(len(response))\n")
    terms = [{"kind": "function", "path": "reward.py:score"}]
    path = grid_file(tmp_path, {}, [1], **{"reward.terms": terms})
    before = fingerprints(finished(path, tmp_path / "out"))
    assert finished(path, tmp_path / "out").ran == ()
    reward.write_text(reward.read_text().replace("float(", "-float("))
    with pytest.raises(UserError, match="another input file than now"):
        finished(path, tmp_path / "out")
    real = grid_module.describe_environment
    with monkeypatch.context() as changed, pytest.raises(UserError, match="another python, input file than now"):
        changed.setattr(grid_module, "describe_environment", lambda *a: {**real(*a), "python": "other"})
        finished(path, tmp_path / "out")
    (run_dir,) = (tmp_path / "out/g/cells/seed=1").glob("*/seed*")
    shutil.rmtree(run_dir)
    assert fingerprints(finished(path, tmp_path / "out")) != before


def laid_out(folder: Path, **fields: object) -> Order:
    """The order of the one cell of a grid, with its configuration in its folder."""
    cell = load_grid(grid_file(folder, {}, [1], **fields)).cells[0]
    grid_module.write_config(cell, folder / "cell")
    return Order(cell.name, str(folder / "cell"), 1)


@slow
def test_an_interrupted_cell_with_a_damaged_log_is_named_and_stops_no_other(tmp_path: Path) -> None:
    path = grid_file(tmp_path, {}, [1, 2])
    cell, folder = load_grid(path).cells[0], tmp_path / "g" / "cells" / "seed=1"
    grid_module.write_config(cell, folder)
    with pytest.raises(KeyboardInterrupt):
        run(cell.config, folder, Stopped(2))  # type: ignore[arg-type]
    log = run_of(folder) / manifest.LOG_NAME  # type: ignore[operator]
    whole = log.read_bytes()
    log.write_bytes(whole.replace(b"0", b"1", 1))
    table = finished(path, tmp_path).table
    assert table["state"].tolist() == ["interrupted", "complete"]
    assert table["message"][0].startswith(f"error: {log}: is not the 2 lines in {len(whole)} bytes")
    log.write_bytes(whole)
    again = finished(path, tmp_path)
    assert again.ran == ("seed=1",)
    assert fingerprints(again)["seed=2"] == table["fingerprint"][1]


@slow
def test_a_cell_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    order = laid_out(tmp_path, **{"ppo.iterations": 5000})
    process = start_cell(order)
    until(lambda: recorded_iterations(Path(order.folder)) >= 2, "two iterations")
    assert process.stdin is not None
    assert cell_state(Path(order.folder)) == "running"
    process.stdin.close()
    assert process.wait(timeout=30) == 1
    assert cell_state(Path(order.folder)) == "running"  # as after a kill
    assert record_result(order, 1, "").exit_code == 1
    assert cell_state(Path(order.folder)) == "interrupted"


def test_the_message_of_a_cell_is_of_its_last_attempt(tmp_path: Path) -> None:
    order = laid_out(tmp_path)
    (tmp_path / "cell" / "log.txt").write_text("error: a mistake that was mended\n")
    process = start_cell(order)
    process.kill()
    result = finish_cell(order, process, 0.0)
    assert result.exit_code < 0
    assert "mended" not in result.message


def test_of_two_grids_on_one_folder_the_second_says_which_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "g").mkdir()
    monkeypatch.setattr("sys.argv", ["/bin/ppo-repro", "grid", "other/g.yaml", "--workers", "2"])
    with only_writer(tmp_path / "g"), pytest.raises(UserError) as caught:
        finished(grid_file(tmp_path, {}, [1]), tmp_path)
    assert "g: another process is writing it (process " in str(caught.value)
    assert ": ppo-repro grid other/g.yaml --workers 2); wait until that process ends" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "argument --workers: must be at least 1"),
        (["--ray", "local", "--slurm", "a=b"], "--ray and --slurm: choose one"),
        (["--slurm", "a"], "--slurm a: must be NAME=VALUE, for example --slurm slurm_partition=cpu"),
        (["--slurm", "a=["], "--slurm a=[: line 1: not valid YAML"),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path: Path, cli: Cli, arguments: list[str], said: str) -> None:
    assert f"error: {said}" in cli.refusal("grid", grid_file(tmp_path, {}, [1]), "--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "shown"), [("function", False), ("exact_match", True)])
def test_the_table_has_no_accuracy_where_a_function_rewards(kind: str, shown: bool, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def score(response):\n    return 1.0\n")
    term = {"kind": kind, "path": str(tmp_path / "r.py:score")} if kind == "function" else {"kind": kind}
    grid = load_grid(written_grid(tmp_path, set={"reward.terms": [term]}))
    columns = {"iterations": 2, "final.eval_accuracy": 0.0, "final.eval_score": 1.0, "fingerprint": "ab", "message": ""}
    table = pd.DataFrame([{"cell": "seed=1", "state": "complete", **columns, "code_digest": "cd"}])
    said = "\n".join(lines(grid, tmp_path, Outcome(table, ())))
    assert ("eval_accuracy" in said) is shown
    assert "eval_score" in said


def test_a_cell_in_gymnasium_has_one_process(tmp_path: Path, cli: Cli) -> None:
    path = written_grid(tmp_path, base=str(SMALL_CONTROL))
    expected = "error: --processes 2: a control run works in one process; leave the option out"
    assert expected in cli.refusal("grid", path, "--out", tmp_path / "out", "--processes", "2")
    assert not (tmp_path / "out").exists()
