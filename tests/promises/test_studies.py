"""A cell of every study, run again, has the committed fingerprint and measures; a changed one is found."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ppo_repro.grids.spec import load_grid
from ppo_repro.grids.study import chosen_cells, read_results
from tests.support.cli import Cli, one_line
from tests.support.paths import ROOT

STUDIES = sorted(path.parent for path in (ROOT / "experiments").glob("*/results.csv"))
WITH_PAGE = sorted(path.parent for path in (ROOT / "experiments").glob("*/answer.py"))
every_study = pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)


@pytest.mark.parametrize("study", WITH_PAGE, ids=lambda path: path.name)
def test_a_page_links_what_was_expected_and_says_what_held(study: Path) -> None:
    page = (study / "README.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 600
    assert f"[`expectation`]({study.name}.yaml)" in page
    ran, held = study in STUDIES, f"({study.name}.yaml), written before the runs, held" in page
    assert ("answer.svg" in page, held, "Not run yet." in page) == (ran, ran, not ran)


@every_study
def test_a_study_has_a_row_for_each_cell(study: Path) -> None:
    grid, rows = load_grid(study / f"{study.name}.yaml"), read_results(study / "results.csv")
    assert [cell.name for cell in grid.cells] == list(rows)
    assert all(re.fullmatch("[0-9a-f]{64}", row["fingerprint"]) for row in rows.values())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@every_study
def test_a_cell_of_a_study_is_reproduced(study: Path, tmp_path: Path, cli: Cli) -> None:
    if study.name == "smollm2" and not (ROOT / "models" / "smollm2").is_dir():
        pytest.skip("needs `ppo-repro fetch smollm2`")
    code, out, _ = cli("reproduce", study, "--out", tmp_path)
    assert (code, out.splitlines()[-1].split(":")[0]) == (0, "identical"), out


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_changed_fingerprint_is_found(tmp_path: Path, cli: Cli) -> None:
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    study = tmp_path / "experiments" / STUDIES[0].name
    cell, *_ = chosen_cells(load_grid(study / f"{study.name}.yaml"), read_results(study / "results.csv"), 1, 0)
    right = read_results(study / "results.csv")[cell.name]["fingerprint"]
    text = (study / "results.csv").read_text()
    (study / "results.csv").write_text(text.replace(right, right[::-1]))
    code, out, _ = cli("reproduce", study, "--out", tmp_path / "runs")
    assert code == 1
    assert f"{cell.name}: fingerprint is {right}, and {right[::-1]} in results.csv" in out


def test_what_is_no_study_is_refused(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "s").mkdir()
    code, _, err = cli("reproduce", tmp_path / "s")
    assert code == 2
    assert "s.yaml" in one_line(err)
    shutil.copy(ROOT / "tests" / "support" / "tiny_grid.yaml", tmp_path / "s" / "s.yaml")
    shutil.copy(ROOT / "tests" / "support" / "tiny.yaml", tmp_path / "s" / "tiny.yaml")
    code, _, err = cli("reproduce", tmp_path / "s")
    assert code == 2
    assert "results.csv: there is no such file" in one_line(err)
