"""A cell of every study, run again, has the committed fingerprint and measures; a changed value is found."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
from matplotlib import pyplot as plt

from experiments import answers
from ppo_repro.base.errors import UserError
from ppo_repro.grids.spec import load_grid
from ppo_repro.grids.study import Reproduction, chosen_cells, first_changed_value, read_results
from tests.support.cli import Cli
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


# a cell takes half a minute, with SmolLM2 minutes; these studies run PPO on the task of `algorithms` or `smollm2`
LONG = ("clip", "critic", "details", "growth", "invariance", "precision", "precision_smollm2", "variance")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "study",
    [pytest.param(path, marks=pytest.mark.long if path.name in LONG else pytest.mark.slow) for path in STUDIES],
    ids=lambda path: path.name,
)
def test_a_cell_of_a_study_is_reproduced(study: Path, tmp_path: Path, cli: Cli) -> None:
    if "smollm2" in study.name and not (ROOT / "models" / "smollm2").is_dir():
        pytest.skip("needs `ppo-repro init --model smollm2`")
    code, out, _ = cli("rerun", study, "--out", tmp_path)
    assert (code, out.splitlines()[-1].split(":")[0]) == (0, "identical"), out


def test_a_changed_value_is_found() -> None:
    """The negative control."""
    committed = read_results(STUDIES[0] / "results.csv")
    name, row = next(iter(committed.items()))
    assert first_changed_value(committed, committed) == ""
    assert "has no such column" in first_changed_value(committed, {name: {**row, "later": 1.0}})
    for column in row.keys() - {"cell"}:
        said = first_changed_value(committed, {name: {**row, column: "x"}})
        assert said == f"{name}: {column} is x, and {row[column]} in results.csv"


@pytest.mark.parametrize(("before", "code"), [(None, 0), (b"cell,x\nb,2\n", 0), (b"other\n", 2)])
def test_rows_replace_only_a_file_of_such_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None, code: int
) -> None:
    out = tmp_path / "rows.csv"
    if before is not None:
        out.write_bytes(before)
    monkeypatch.setattr(answers, "results_of", lambda *arguments: pd.DataFrame({"cell": ["a"], "x": [1.0]}))
    monkeypatch.setattr(sys, "argv", ["answer", str(tmp_path), "--csv", str(out)])
    with pytest.raises(SystemExit) as ended:
        answers.study(str(tmp_path / "s" / "answer.py"), lambda rows: [], lambda rows: plt.gca())
    assert ended.value.code == code
    assert out.read_bytes() == (before if code else b"cell,x\na,1\n")


def test_rows_without_a_grid_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", ["answer", "--csv", str(out)])
    with pytest.raises(SystemExit) as ended:
        answers.study(str(STUDIES[0] / "answer.py"), lambda rows: [], lambda rows: plt.gca())
    assert ended.value.code == 2
    assert f"--csv {out}: the rows come from the runs of a grid; give its folder too" in capsys.readouterr().err
    assert not out.exists()


def test_only_cells_that_every_machine_repeats_are_chosen(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "support" / "tiny.yaml", tmp_path / "tiny.yaml")
    (tmp_path / "g.yaml").write_text(
        "question: q\nexpectation: e\nbase: tiny.yaml\nseeds: [1, 2]\n"
        "axes: {sampler: {own: {}, stock: {mismatch.sampler.stock: bfloat16}}}\n"
    )
    grid = load_grid(tmp_path / "g.yaml")
    rows = {cell.name: dict[str, str]() for cell in grid.cells}
    exact = [cell for cell in grid.cells if "own" in cell.name]
    assert chosen_cells(grid, rows, 2, 0) == tuple(exact)
    with pytest.raises(UserError, match="--cells 3: must be from 1 to 2, the cells that every machine repeats"):
        chosen_cells(grid, rows, 3, 0)


def test_a_difference_is_exit_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Reproduction(("a",), "a: score is 1, and 2 in results.csv", "runs")
    monkeypatch.setattr("ppo_repro.grids.study.reproduce", lambda *arguments: found)
    code, out, _ = cli("rerun", STUDIES[0])
    assert code == 1
    assert found.difference in out


def test_what_is_no_study_is_refused(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").mkdir()
    assert "s: holds no manifest.json" in cli.refusal("rerun", tmp_path / "s")
    shutil.copy(ROOT / "tests" / "support" / "tiny_grid.yaml", tmp_path / "s" / "s.yaml")
    shutil.copy(ROOT / "tests" / "support" / "tiny.yaml", tmp_path / "s" / "tiny.yaml")
    assert "results.csv: there is no such file" in cli.refusal("rerun", tmp_path / "s")
    monkeypatch.chdir(tmp_path / "s")
    assert "results.csv: there is no such file" in cli.refusal("rerun", ".")


def test_an_option_of_the_other_kind_is_refused(cli: Cli, deterministic_run: Path) -> None:
    for option in ("--cells", "--seed", "--workers"):
        assert f"{option}: is for studies" in cli.refusal("rerun", deterministic_run, option, "1")
    assert "--iterations: is for runs" in cli.refusal("rerun", STUDIES[0], "--iterations", "1:2")
    assert "--set: is for runs" in cli.refusal("rerun", STUDIES[0], "--set", "layout.threads=2")
