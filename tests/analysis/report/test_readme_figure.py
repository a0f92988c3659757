"""The picture of the README, from made-up curves and through its command."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.report import readme_figure
from ppo_repro.errors import UserError


def curve(mode: str, run: str, accuracy: list[float], unequal: list[float]) -> pd.DataFrame:
    tokens = np.where(np.isnan(unequal), np.nan, 100.0)
    rows = {"iteration": range(len(accuracy)), "accuracy": accuracy, "tokens": tokens, "unequal": unequal}
    return pd.DataFrame(rows).assign(mode=mode, run=run)


BOTH = pd.concat(
    [
        curve("deterministic", "a", [0.2, 0.4, 0.6], [0.0, 0.0, np.nan]),
        curve("deterministic", "b", [0.1, 0.2, 0.2], [0.0, 0.0, np.nan]),
        curve("native", "c", [0.2, 0.3, 0.5], [0.5, 0.25, np.nan]),
    ],
    ignore_index=True,
)


def test_mean_and_range_by_hand() -> None:
    line = readme_figure.over_runs(BOTH[BOTH["mode"] == "deterministic"], "accuracy", "deterministic")
    assert line.y.tolist() == pytest.approx([0.15, 0.3, 0.4])
    assert line.low is not None and line.low.tolist() == [0.1, 0.2, 0.2]
    assert line.high is not None and line.high.tolist() == [0.2, 0.4, 0.6]


def test_the_picture_says_what_it_shows_and_has_a_background() -> None:
    root = ET.fromstring(readme_figure.draw(BOTH))
    said = " ".join(root.itertext())
    assert "mean and range of 2 seeds" in said and "deterministic: 0 of 400" in said and "native: 38 %" in said
    space = "{http://www.w3.org/2000/svg}"
    assert [child.tag for child in root][2] == f"{space}rect"
    assert len(list(root.iter(f"{space}svg"))) == 3


def test_one_kind_of_numerics_is_refused() -> None:
    with pytest.raises(UserError, match="deterministic and in native"):
        readme_figure.draw(BOTH[BOTH["mode"] == "deterministic"])


def test_a_folder_that_is_no_run_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert readme_figure.main([str(tmp_path), "--out", str(tmp_path / "a.svg")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "a.svg").exists()


def test_out_never_costs_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readme_figure, "curves", lambda runs: BOTH)
    path = tmp_path / "a.svg"
    for _ in range(2):  # over nothing, and over an earlier picture
        assert readme_figure.main([str(tmp_path), "--out", str(path)]) == 0
    assert path.read_text() == readme_figure.draw(BOTH)
    path.write_text("mine")
    assert readme_figure.main([str(tmp_path), "--out", str(path)]) == 2 and path.read_text() == "mine"
    assert "is not an earlier picture; must be a new file or" in capsys.readouterr().err
    assert readme_figure.main([str(tmp_path), "--out", str(tmp_path / "no" / "a.svg")]) == 2
