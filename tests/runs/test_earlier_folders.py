"""Runs and grids of an earlier version, which had fewer fields and gave the same configuration another digest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ppo_repro
from ppo_repro.base.errors import UserError
from ppo_repro.config.files import load_config
from ppo_repro.config.yaml_text import read_yaml, write_yaml
from ppo_repro.grids.cell import Processes
from ppo_repro.grids.grid import lay_out, run_grid
from ppo_repro.grids.spec import load_grid
from ppo_repro.records import manifest
from ppo_repro.records.diff import setup_changes
from ppo_repro.runs.resume import Resumed
from ppo_repro.runs.verify import verify
from tests.grids.small_grids import grid_file
from tests.support.language import fork, rerun, resume, run
from tests.support.paths import TINY
from tests.support.resume import record, require_as_uninterrupted
from tests.support.runs import run_below


def with_fewer_fields(path: Path) -> bytes:
    """Write a resolved configuration as a version wrote it that did not have some of the fields."""
    tree: Any = read_yaml(path)
    del tree["mismatch"], tree["ppo"]["weight_decay"], tree["layout"]["prefix_cache"], tree["kl"]["controller"]
    path.write_text(write_yaml(tree))
    return path.read_bytes()


def aged(run_dir: Path) -> Path:
    """A run folder as such a version wrote it, under the name that it gave."""
    head, config = manifest.load_head(run_dir), with_fewer_fields(run_dir / "config.yaml")
    files = {**head.files, "config.yaml": manifest.content_digest(config)}
    manifest.save(head.model_copy(update={"config_digest": "0123456789ab", "files": files}), run_dir)
    return run_dir.rename(run_dir.with_name("seed7-0123456789ab"))


def test_a_run_of_an_earlier_version_opens_resumes_reruns_and_forks(tmp_path: Path) -> None:
    recorded = record(load_config(TINY, ["checkpoints.every=1", "ppo.iterations=3"]), tmp_path)
    new = Path(shutil.copytree(recorded.whole, tmp_path / "new"))
    whole, part = aged(recorded.whole), aged(recorded.copy(2, tmp_path))
    assert ppo_repro.open_run(whole).status == "complete"
    assert setup_changes(whole, new) == {}
    assert verify(whole).iterations == 3
    assert rerun(whole).difference is None
    assert resume(part) == Resumed(2, 2)
    require_as_uninterrupted(part, whole)
    forked = fork(whole, tmp_path / "forks", 2, "kl.kl_coef=0.5")
    origin = manifest.load(forked).origin
    assert origin is not None
    assert origin.changed == {"kl.kl_coef": [0.05, 0.5]}
    assert rerun(forked).difference is None


def test_a_grid_begun_with_an_earlier_version_keeps_every_cell(tmp_path: Path) -> None:
    grid = load_grid(grid_file(tmp_path, {}, [1, 2]))
    for cell in grid.cells:
        folder = tmp_path / "g" / "cells" / cell.name
        lay_out(cell, folder)
        run(load_config(folder / "config.yaml"), folder)
        aged(run_below(folder))
        with_fewer_fields(folder / "config.yaml")
    kept = run_grid(grid, tmp_path, Processes(1))
    assert kept.ran == ()
    assert kept.table["state"].tolist() == ["complete", "complete"]
    recorded_less = load_grid(grid_file(tmp_path, {}, [1, 2], **{"records.level": "lean"}))
    assert run_grid(recorded_less, tmp_path, Processes(1)).ran == ()
    # the control: another value of one of the fields
    changed = load_grid(grid_file(tmp_path, {}, [1, 2], **{"ppo.weight_decay": 0.5, "records.level": "lean"}))
    said = r"seed=1: was made from another configuration than the grid file has now \(ppo.weight_decay: 0.0 -> 0.5\);"
    with pytest.raises(UserError, match=said):
        run_grid(changed, tmp_path, Processes(1), keep_changed=True)
