"""Where files are looked for: configurations of the package by their names, relative paths from a file's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.config.files import found, load_config
from ppo_repro.config.yaml_text import write_yaml
from ppo_repro.grids.spec import load_grid
from tests.config.trees import JSONL, tree
from tests.support.paths import ROOT


def test_a_name_is_a_file_of_the_package_unless_there_is_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert found(Path("quickstart")) == ROOT / "experiments" / "quickstart.yaml"
    assert found(Path("sub/quickstart")) == Path("sub/quickstart")
    (tmp_path / "quickstart").write_text("experiment: mine")
    assert found(Path("quickstart")) == Path("quickstart")


def test_relative_paths_follow_the_file_and_paths_of_overrides_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    terms = [{"kind": "function", "path": "reward.py:score"}]
    (folder / "c.yaml").write_text(write_yaml({**tree(), "task": {**JSONL, "path": "p"}, "reward": {"terms": terms}}))
    (folder / "g.yaml").write_text(
        "question: q\nexpectation: e\nbase: c.yaml\nseeds: [1]\naxes: {task.path: [a.jsonl, b.jsonl]}\nread_with: r\n"
    )
    monkeypatch.chdir(elsewhere)
    config = load_config(Path("../mine/c.yaml"))
    assert (config.task.path, config.reward.terms[0].path) == (str(folder / "p"), str(folder / "reward.py:score"))
    assert load_config(Path("../mine/c.yaml"), ["task.path=p"]).task.path == str(elsewhere / "p")
    paths = [cell.config.task.path for cell in load_grid(Path("../mine/g.yaml")).cells]
    assert paths == [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
