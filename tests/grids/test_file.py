"""A grid file: how it expands, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.base.errors import UserError
from ppo_repro.config.run import RunConfig
from ppo_repro.grids.spec import load_grid
from tests.grids.small_grids import written_grid
from tests.support.paths import SMALL_CONTROL, TINY, TINY_GRID


def test_the_product_of_axes_and_seeds() -> None:
    grid = load_grid(TINY_GRID)
    assert grid.name == "tiny_grid"
    assert len(grid.cells) == 2 * 2 * 2 * 3
    first = grid.cells[0]
    assert first.name == "learning_rate=0.001,epochs=1,kl=reward,seed=1"
    assert first.labels == {"ppo.learning_rate": "0.001", "ppo.epochs": "1", "kl": "reward"}
    assert isinstance(first.config, RunConfig)
    assert (first.config.ppo.iterations, first.config.checkpoints.every) == (3, 1)
    seen = {
        (c.config.ppo.learning_rate, c.config.ppo.epochs, c.config.kl.placement, c.seed)
        for c in grid.cells
        if isinstance(c.config, RunConfig)
    }
    assert seen == {(r, e, k, s) for r in (1e-3, 3e-3) for e in (1, 2) for k in ("reward", "loss") for s in (1, 2, 3)}
    assert all(c.config.seed == c.seed for c in grid.cells)
    assert load_grid(TINY_GRID) == grid


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=4, unique=True), st.sets(st.integers(0, 99), min_size=1))
def test_names_are_stable_distinct_and_safe(
    tmp_path_factory: pytest.TempPathFactory, rates: list[float], seeds: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("grid")
    cells = load_grid(written_grid(folder, axes={"ppo.learning_rate": rates}, seeds=sorted(seeds))).cells
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) == len(rates) * len(seeds)
    assert all(Path(name).name == name and not name.startswith(".") for name in names)
    # another order of the axis' values, or one more seed, renames nothing
    others = load_grid(written_grid(folder, axes={"ppo.learning_rate": rates[::-1]}, seeds=[*sorted(seeds), 100])).cells
    assert set(names) <= {cell.name for cell in others}


def test_relative_paths_follow_the_file_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = yaml.safe_load(TINY.read_text())
    tree["task"] = {"kind": "jsonl", "path": "../prompts.jsonl", "num_eval_prompts": 1}
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "base.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "grids").mkdir()
    labels = {name: {"reward.terms": [{"kind": "function", "path": f"{name}.py:score"}]} for name in ("a", "b")}
    path = written_grid(tmp_path / "grids", base="../bases/base.yaml", axes={"reward": labels})
    monkeypatch.chdir("/")
    for cell, name in zip(load_grid(path).cells, labels, strict=True):
        config = cell.config.model_dump()
        assert config["task"]["path"] == str(tmp_path / "prompts.jsonl")
        assert config["reward"]["terms"][0]["path"] == str(tmp_path / "grids" / f"{name}.py:score")


def test_a_label_cannot_leave_the_folder(tmp_path: Path) -> None:
    labels = {"../../x": {"ppo.epochs": 1}, "/etc": {"ppo.epochs": 2}}
    names = [cell.name for cell in load_grid(written_grid(tmp_path, axes={"a": labels})).cells]
    assert names == ["a=.._.._x,seed=1", "a=_etc,seed=1"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"axes": {"ppo.epoch": [1, 2]}}, "cell epoch=1,seed=1: ppo.epoch: unknown field"),
        ({"axes": {"ppo.epochs": [1, 0]}}, "cell epochs=0,seed=1: ppo.epochs = 0: must be at least 1"),
        ({"axes": {"ppo.epochs": [1, 1]}}, "axes.ppo.epochs: has '1' twice; keep one"),
        ({"axes": {"ppo.epochs": []}}, "axes.ppo.epochs: is empty; give it at least one value or remove it"),
        ({"axes": {"x": {"a": {"seed": 2}}}}, "axes.x and seeds both set seed; keep one"),
        ({"axes": {"x": {"a": {"ppo.epochs": 2}, "b": {}}}}, "cells x=a,seed=1 and x=b,seed=1 are the same run"),
        ({"axes": {"x": {"a": 3}}}, "axes.x.a: must be a text label with a mapping of fields"),
        ({"axes": {"ppo.epochs": 2}}, "axes.ppo.epochs = 2: must be a list of values or a mapping of labels"),
        ({"axes": {"ppo.epochs": [1]}, "set": {"ppo.epochs": 3}}, "set.ppo.epochs and axes.ppo.epochs both set"),
        ({"axes": {"ppo.epochs": [1, 2]}, "set": {"ppo": {}}}, "set.ppo and axes.ppo.epochs both set ppo.epochs"),
        ({"axes": {"ppo": [{}]}, "set": {"ppo.epochs": 3}}, "set.ppo.epochs and axes.ppo both set ppo; keep one"),
        ({"set": {"experiment.x": 2}}, "experiment.x: 'experiment' is a value, not a group of fields"),
        ({"seeds": [1, 1]}, "two cells would be called seed=1"),
        ({"axis": {}}, "axis: unknown field"),
        ({"base": str(SMALL_CONTROL), "set": {"lora": None}}, "cell seed=1: lora: unknown field"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        load_grid(written_grid(tmp_path, **changes))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_name_that_is_no_name(tmp_path: Path) -> None:
    path = written_grid(tmp_path).rename(tmp_path / "my grid.yaml")
    with pytest.raises(UserError, match="the file name is the grid"):
        load_grid(path)
