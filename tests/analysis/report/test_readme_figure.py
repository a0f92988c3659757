"""The picture of the README, from made-up curves and through its command."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pandas as pd
import pytest

from analysis.report import readme_figure
from ppo_repro.errors import UserError


def curve(mode: str, run: str, accuracy: list[float], unequal: list[float]) -> pd.DataFrame:
    rows = {"iteration": range(len(accuracy)), "accuracy": accuracy, "tokens": [100.0] * len(unequal) + [None]}
    return pd.DataFrame({**rows, "unequal": [*unequal, None]}).assign(mode=mode, run=run)


BOTH = pd.concat(
    [
        curve("deterministic", "a", [0.2, 0.4, 0.6], [0.0, 0.0]),
        curve("deterministic", "b", [0.1, 0.2, 0.2], [0.0, 0.0]),
        curve("native", "c", [0.2, 0.3, 0.5], [50.0, 25.0]),
    ],
    ignore_index=True,
)


def test_the_picture_says_what_it_shows() -> None:
    line = readme_figure.over_runs(BOTH[BOTH["mode"] == "deterministic"], "accuracy")
    assert line["mean"].tolist() == pytest.approx([0.15, 0.3, 0.4]) and line["max"].tolist() == [0.2, 0.4, 0.6]
    said = " ".join(ET.fromstring(readme_figure.draw(BOTH)).itertext())
    assert "mean and range of 2 seeds" in said and "deterministic: 0 of 400" in said and "native: 38 %" in said
    with pytest.raises(UserError, match="deterministic and in native"):
        readme_figure.draw(BOTH[BOTH["mode"] == "deterministic"])


def test_out_replaces_an_earlier_picture_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert readme_figure.main([str(tmp_path), "--out", str(tmp_path / "a.svg")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "a.svg").exists()
    monkeypatch.setattr(readme_figure, "curves", lambda runs: BOTH)
    path = tmp_path / "a.svg"
    for _ in range(2):
        assert readme_figure.main([str(tmp_path), "--out", str(path)]) == 0
    assert path.read_text() == readme_figure.draw(BOTH)
    path.write_text("mine")
    assert readme_figure.main([str(tmp_path), "--out", str(path)]) == 2 and path.read_text() == "mine"
    assert "is not an earlier picture; must be a new file or" in capsys.readouterr().err
