"""The configurations that come with the package are found by their names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.config.files import SHIPPED, found, load_config
from ppo_repro.config.yaml_text import write_yaml
from ppo_repro.errors import UserError
from ppo_repro.grids.spec import load_grid
from tests.config.trees import JSONL, tree
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", SHIPPED)
def test_a_name_is_the_file_of_the_checkout(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert found(Path(name)) == ROOT / "experiments" / f"{name}.yaml"
    assert load_config(Path(name)) == load_config(ROOT / "experiments" / f"{name}.yaml")
    (tmp_path / name).write_text("experiment: mine")
    assert found(Path(name)) == Path(name)


def test_another_name_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert found(Path("sub/quickstart")) == Path("sub/quickstart")
    with pytest.raises(UserError, match="quickstarts"):
        load_config(Path("quickstarts"))


def test_relative_paths_follow_the_file_and_those_of_overrides_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    for each in (folder, elsewhere):
        each.mkdir()
    (folder / "prompts.jsonl").write_text("")
    terms = [{"kind": "function", "path": "reward.py:score"}]
    (folder / "c.yaml").write_text(
        write_yaml({**tree(), "task": JSONL | {"path": "p.jsonl"}, "reward": {"terms": terms}})
    )
    (folder / "g.yaml").write_text(
        "question: q\nexpectation: e\nbase: c.yaml\nseeds: [1]\naxes: {task.path: [a.jsonl, b.jsonl]}\nread_with: r\n"
    )
    monkeypatch.chdir(elsewhere)
    config = load_config(Path("../mine/c.yaml"))
    assert config.task.path == str(folder / "p.jsonl") and config.reward.terms[0].path == str(
        folder / "reward.py:score"
    )
    assert load_config(Path("../mine/c.yaml"), ["task.path=p.jsonl"]).task.path == str(elsewhere / "p.jsonl")
    paths = [cell.config.task.path for cell in load_grid(Path("../mine/g.yaml")).cells]
    assert paths == [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
