"""The configurations that come with the package are found by their names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.config.files import SHIPPED, found, load_config
from ppo_repro.errors import UserError
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
