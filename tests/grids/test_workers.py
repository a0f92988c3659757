"""Cells that are forked from one worker, and cells of several processes: isolated, seeded, logged as others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ppo_repro.grids.cell import LOG, Order, finish_cell, start_cell, state_of
from ppo_repro.grids.engines import Processes
from ppo_repro.grids.grid import _lay_out, run_grid
from ppo_repro.grids.progress import ConsoleGrid
from ppo_repro.grids.spec import load_grid
from ppo_repro.grids.worker import ForkedCell, Worker
from ppo_repro.records import reader
from tests.support.grids import grid_file
from tests.support.interrupts import hearing_ctrl_c

pytestmark = pytest.mark.timeout(400)
slow = pytest.mark.slow


def order_of(folder: Path, name: str = "seed=1") -> Order:
    return Order(name, str(folder / "out" / "g" / "cells" / name), "language", 1)


@slow
def test_a_reward_that_changes_its_process_changes_no_other_cell(tmp_path: Path) -> None:
    """Each cell leaves its name in modules of Python's and torch's, and scores less where it finds another's."""
    (tmp_path / "r.py").write_text(
        "import math, os, torch\n\n\ndef mark(name):\n"
        "    return [module.__dict__.setdefault('cell', name) for module in (math, torch)].count(name)\n\n\n"
        "def ends(prompt, response, answer):\n    mark('ends')\n    os._exit(9)\n\n\n"
        "def first(prompt, response, answer):\n    return len(response) + mark('first')\n\n\n"
        "def second(prompt, response, answer):\n    return len(response) + mark('second')\n"
    )
    terms = {name: [{"kind": "function", "path": f"{tmp_path}/r.py:{name}"}] for name in ("ends", "first", "second")}
    axes: dict[str, object] = {"r": {name: {"reward.terms": term} for name, term in terms.items()}}
    path = grid_file(tmp_path, axes, [1], **{"ppo.iterations": 1})
    outcome = run_grid(load_grid(path), tmp_path / "out", Processes(1), ConsoleGrid())
    states = outcome.table.set_index("cell")["state"]
    assert states.tolist() == ["interrupted", "complete", "complete"]
    run_dirs = [tmp_path / "out" / "g" / run_dir for run_dir in outcome.table["run_dir"][1:]]
    first, second = (reader.read_arrow(run_dir, "sequences", 0).to_pandas() for run_dir in run_dirs)
    assert (first["scores"] == first["response"].str.len() + 2).all()  # 1 where another cell's name were found
    assert (second["scores"] == second["response"].str.len() + 2).all()


@slow
def test_a_forked_cell_is_a_cell_in_a_process_of_its_own(tmp_path: Path) -> None:
    grid = load_grid(grid_file(tmp_path, {}, [1], **{"ppo.iterations": 5000}))
    _lay_out(grid, tmp_path / "out" / "g")
    order = order_of(tmp_path)
    folder = Path(order.folder)
    worker = Worker(1, folder / LOG)
    cell = ForkedCell(worker, order)
    deadline = time.monotonic() + 200
    while state_of(folder) != "running":
        assert time.monotonic() < deadline and cell.poll() is None, (folder / LOG).read_text()
        time.sleep(0.05)
    pid = cell._pid
    assert pid is not None and pid != os.getpid() and os.getsid(pid) == pid
    worker.close()  # as the end of the grid does, however it ends
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the cell outlives its grid"
        time.sleep(0.05)
    assert state_of(folder) == "running"  # as after a kill


@slow
@pytest.mark.parametrize("way", ["forked", "one"])
def test_ctrl_c_at_the_first_instant_of_a_cell_interrupts_it(tmp_path: Path, way: str) -> None:
    _lay_out(load_grid(grid_file(tmp_path, {}, [1])), tmp_path / "out" / "g")
    order = order_of(tmp_path)
    with hearing_ctrl_c():
        cell = ForkedCell(Worker(1, Path(order.folder) / LOG), order) if way == "forked" else start_cell(order)
    while isinstance(cell, ForkedCell) and cell._pid is None:
        assert cell.poll() is None
    cell.send_signal(signal.SIGINT)
    code = cell.wait(200)
    if isinstance(cell, ForkedCell):
        cell.worker.close()
    elif cell.stdin is not None:
        cell.stdin.close()
    assert code == 130 and finish_cell(order, code, 0.0).message == "interrupted"
    assert state_of(Path(order.folder)) == "interrupted"


def test_a_worker_that_cannot_start_ends_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('error: no torch today')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    _lay_out(load_grid(grid_file(tmp_path, {}, [1])), tmp_path / "out" / "g")
    order = order_of(tmp_path)
    (result,) = [r for r in Processes(1).run([order]) if r is not None]
    assert result.exit_code == 1 and result.message == "error: no torch today"
