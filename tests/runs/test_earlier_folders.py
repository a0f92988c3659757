"""Runs and grids recorded with fewer fields and another digest of the configuration; checkpoints of other versions."""

from __future__ import annotations

import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import ppo_repro
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST
from ppo_repro.base.mode import Precision
from ppo_repro.config.files import load_config
from ppo_repro.config.yaml_text import read_yaml, write_yaml
from ppo_repro.grids.executor import Processes
from ppo_repro.grids.grid import run_grid, write_config
from ppo_repro.grids.spec import load_grid
from ppo_repro.numerics import library
from ppo_repro.records import manifest
from ppo_repro.records.changes import setup_changes
from ppo_repro.runs import checkpoint
from ppo_repro.runs.resume import Resumed
from ppo_repro.runs.verify_files import verify_files
from ppo_repro.runs.verify_stages import recompute
from tests.grids.small_grids import grid_file
from tests.support.language import fork, rerun, resume, run, tiny_run
from tests.support.paths import TINY
from tests.support.resume import newest, record, require_as_uninterrupted
from tests.support.runs import run_below


def with_fewer_fields(path: Path) -> bytes:
    """Remove fields of a resolved configuration, as if the version that wrote it did not have them."""
    tree: Any = read_yaml(path)
    del tree["mismatch"], tree["ppo"]["weight_decay"], tree["layout"]["prefix_cache"], tree["kl"]["controller"]
    path.write_text(write_yaml(tree))
    return path.read_bytes()


def with_digests(log: Path) -> list[bytes]:
    """End each line of a log with a SHA-256, as earlier versions did, and return the lines."""
    lines = [line[:-1] + b',"sha256":"%064x"}\n' % 0 for line in log.read_bytes().splitlines()]
    log.write_bytes(b"".join(lines))
    return lines


def aged(run_dir: Path) -> Path:
    """Make a run one of an earlier version: fewer fields, another log, a folder with the name of another digest."""
    head, config = manifest.load_head(run_dir), with_fewer_fields(run_dir / "config.yaml")
    lines = with_digests(run_dir / manifest.LOG_NAME)
    changes = {
        "config_digest": "0123456789ab",
        "files": {**head.files, "config.yaml": manifest.content_digest(config)},
        "log_bytes": sum(map(len, lines)),
        "log_digest": reduce(manifest.extended, lines, ""),
    }
    manifest.save(head.model_copy(update=changes), run_dir)
    return run_dir.rename(run_dir.with_name("seed7-0123456789ab"))


def test_a_run_recorded_with_fewer_fields_opens_resumes_reruns_and_forks(tmp_path: Path) -> None:
    recorded = record(load_config(TINY, ["checkpoints.every=1", "ppo.iterations=3"]), tmp_path)
    new = Path(shutil.copytree(recorded.whole, tmp_path / "new"))
    whole, part = aged(recorded.whole), aged(recorded.copy(2, tmp_path))
    assert ppo_repro.open_run(whole).status == "complete"
    assert setup_changes(whole, new) == {}
    assert verify_files(whole).iterations == 3
    assert rerun(whole).difference is None
    assert resume(part) == Resumed(2, 2)
    require_as_uninterrupted(part, whole)
    forked = fork(whole, tmp_path / "forks", 2, "kl.kl_coef=0.5")
    origin = manifest.load(forked).origin
    assert origin is not None
    assert origin.changed == {"kl.kl_coef": [0.05, 0.5]}
    assert rerun(forked).difference is None


def test_a_checkpoint_of_another_version_is_never_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = record(load_config(TINY, ["checkpoints.every=1", "ppo.iterations=3"]), tmp_path).copy(2, tmp_path)
    monkeypatch.setattr(checkpoint, "__version__", "7.0")
    said = r"safetensors: version [0-9.]+ of ppo_repro wrote it, and this is version 7\.0; resume with the version "
    before = (part / MANIFEST).read_bytes()
    with pytest.raises(UserError, match=said + "that wrote it; or remove "):
        resume(part)
    assert (part / MANIFEST).read_bytes() == before
    monkeypatch.setattr(checkpoint, "FORMAT", "5")
    with pytest.raises(UserError, match="has format 6, and this ppo_repro reads format 5; use the version that wrote"):
        resume(part)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_checkpoint_of_kernels_with_other_bits_is_never_resumed(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = ["checkpoints.every=1", "ppo.iterations=3", f"numerics.precision={precision}"]
    recorded = record(load_config(TINY, fields), tmp_path)
    part = recorded.copy(2, tmp_path)
    answer = {"highest": library.KNOWN_ANSWER, "high": library.KNOWN_ANSWER_HIGH}[precision]
    with safe_open(newest(part), framework="pt") as file:
        assert file.metadata()["law"] == f"known answer {answer:016x}"
    same: Precision = "high" if precision == "highest" else "highest"
    monkeypatch.setattr(checkpoint, "_KERNELS", {same: checkpoint._KERNELS[same], precision: "known answer 7"})
    with pytest.raises(UserError, match="the kernels of this ppo_repro give other bits than the kernels that wrote it"):
        resume(part)
    # the control: the kernels of the other precision alone have changed
    monkeypatch.setattr(checkpoint, "_KERNELS", {same: "known answer 7", precision: f"known answer {answer:016x}"})
    assert resume(part) == Resumed(2, 2)
    require_as_uninterrupted(part, recorded.whole)


def test_a_fork_of_another_version_is_verified_and_not_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = tiny_run(tmp_path, "checkpoints.every=1", "ppo.iterations=2")
    forked = fork(origin, tmp_path / "forks", 1, "kl.kl_coef=0.5")
    monkeypatch.setattr(checkpoint, "__version__", "7.0")
    computed = recompute(forked, manifest.load(forked))
    assert computed is not None
    assert (computed.iterations, computed.difference) == (1, None)
    with pytest.raises(UserError, match="resume with the version that wrote it"):
        rerun(forked)


def test_a_grid_recorded_with_fewer_fields_keeps_every_cell(tmp_path: Path) -> None:
    grid = load_grid(grid_file(tmp_path, {}, [1, 2]))
    for cell in grid.cells:
        folder = tmp_path / "g" / "cells" / cell.name
        write_config(cell, folder)
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
