"""A grid on a Ray cluster of two nodes, one of which is killed; and what is refused. Mostly slow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ppo_repro.commands.cli import _run
from ppo_repro.grids.engines import Processes
from ppo_repro.grids.grid import run_grid
from ppo_repro.grids.progress import ConsoleGrid
from ppo_repro.grids.ray_tasks import Ray
from ppo_repro.grids.spec import load_grid
from tests.support.grids import fingerprints, grid_file, held_grid_file, resumed
from tests.support.ray_nodes import RayCluster, ray_cluster
from tests.support.runs import recorded_iterations
from tests.support.slurm import free_ports

pytestmark = pytest.mark.timeout(400)


class LosingANode(ConsoleGrid):
    """Kills the second node when both cells stand still after two iterations, and lets them go on then."""

    def __init__(self, nodes: RayCluster, out: Path, hold: Path) -> None:
        super().__init__()
        self._nodes, self._out, self._hold = nodes, out, hold
        self._deadline = time.monotonic() + 300

    def look(self) -> None:
        assert time.monotonic() < self._deadline, "the cells do not get there"
        if self._hold.exists() and recorded_iterations(self._out) == 4:
            self._nodes.lose_the_second()
            self._hold.unlink()


@pytest.mark.slow
def test_a_node_that_is_killed_costs_no_cell(tmp_path: Path) -> None:
    path, hold = held_grid_file(tmp_path, {}, [1, 2])
    grid, out = load_grid(path), tmp_path / "out"
    with ray_cluster() as nodes:
        outcome = run_grid(grid, out, Ray(nodes.address, 1), LosingANode(nodes, out, hold))
    assert not hold.exists()
    assert sorted(resumed(out, cell) for cell in outcome.table["cell"]) == [0, 1]  # that of the other node went on
    alone = run_grid(grid, tmp_path / "alone", Processes(1), ConsoleGrid())
    assert fingerprints(outcome) == fingerprints(alone) and len(set(fingerprints(alone).values())) == 2


def test_a_ray_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    path = grid_file(tmp_path, {}, [1])
    assert _run(["grid", str(path), "--out", str(tmp_path / "out"), "--ray", address]) == 2
    said = f"error: --ray {address}: cannot be reached ([Errno 111] Connection refused); start it with `ray start`\n"
    assert capsys.readouterr().err.endswith(f"\n{said}") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("option", "package"), [(["--ray", "local"], "ray"), (["--slurm", "a=b"], "submitit")])
def test_a_package_that_is_missing_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: list[str],
    package: str,
) -> None:
    for module in ("ray_tasks", "slurm"):
        monkeypatch.setattr(f"ppo_repro.grids.{module}.find_spec", lambda name: None)
    monkeypatch.setattr("ppo_repro.grids.slurm.shutil.which", lambda command: command)
    assert _run(["grid", str(grid_file(tmp_path, {}, [1])), "--out", str(tmp_path / "out"), *option]) == 2
    said = f"error: {option[0]}: needs {package}; install it with pip install 'ppo_repro[grid]'\n"
    assert capsys.readouterr().err.endswith(f"\n{said}") and not (tmp_path / "out").exists()
