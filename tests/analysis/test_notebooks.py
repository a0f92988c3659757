"""The notebooks: executed as they are written, whole, small, without a machine's paths; they run on other runs too."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import recorded
from ppo_repro.base.errors import UserError
from ppo_repro.records import manifest, reader
from tests.support.paths import ROOT
from tests.support.synthetic_run import cut_back

NOTEBOOKS = ROOT / "analysis"
NAMES = ("ablation_grid", "clipping", "mismatch", "tokenization")
MACHINE = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|var|opt|work|mnt|Users|private)/|[A-Z]:\\\\")


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in code_cells(notebook) for output in cell["outputs"]]


def pictures(notebook: dict[str, Any]) -> list[bytes]:
    """PNG files."""
    found = (output.get("data", {}).get("image/png") for output in outputs(notebook))
    return [base64.b64decode("".join(text)) for text in found if text]


def faults(notebook: dict[str, Any]) -> list[str]:
    """What is wrong with an executed notebook."""
    found = []
    if [cell["execution_count"] for cell in code_cells(notebook)] != list(range(1, len(code_cells(notebook)) + 1)):
        found.append("not executed from top to bottom")
    for output in outputs(notebook):
        if output["output_type"] == "error":
            found.append(f"an error: {output['ename']}")
        if output.get("name") == "stderr":
            found.append(f"a warning: {''.join(output['text'])[:200]}")
        texts = {kind: text for kind, text in output.get("data", {}).items() if not kind.startswith("image/")}
        shown = "".join("".join(text) for text in [output.get("text", ""), *texts.values()])
        found += [f"a path of a machine: {shown[max(0, m.start() - 40) :][:100]}" for m in MACHINE.finditer(shown)]
    if len(pictures(notebook)) < 2:
        found.append("fewer than two pictures")
    return found


def written(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_executed_and_its_outputs_are_of_its_code(name: str) -> None:
    pytest.importorskip("nbclient", reason="the extra [notebook] is not installed")
    from analysis.execute import sources_digest

    notebook = written(name)
    assert faults(notebook) == []
    assert notebook["metadata"]["executed"] == sources_digest(notebook), "python -m analysis.execute executes it again"
    changed = json.loads(json.dumps(notebook))
    code_cells(changed)[-1]["source"].append("\n1")
    assert sources_digest(changed) != sources_digest(notebook)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_notebook_imports_from_the_package_exists(name: str) -> None:
    lines = "".join(line for cell in code_cells(written(name)) for line in [*cell["source"], "\n"]).splitlines()
    of_package = [line for line in lines if line.startswith(("from ppo_repro", "import ppo_repro"))]
    assert of_package
    exec("\n".join(of_package), {})


def grid_of(runs: dict[tuple[float, int], Path], folder: Path) -> Path:
    """The tables that `ppo-repro grid` writes, of runs at hand by clip range and seed."""
    cells, results = [], []
    for (clip_range, seed), run in runs.items():
        recorded = manifest.load(run)
        row = {"axis.clip_range": clip_range, "seed": seed, "fingerprint": recorded.fingerprint}
        final = {f"final.{name}": value for name, value in recorded.final.items() if not isinstance(value, str)}
        cells.append({**row, "state": "complete", "run_dir": str(run), **final})
        results.append(reader.read_iterations(run).assign(**row))
    folder.mkdir()
    pd.DataFrame(cells).to_parquet(folder / "cells.parquet")
    pd.concat(results).to_parquet(folder / "results.parquet")
    return folder


def test_a_notebook_reads_a_complete_run_and_no_interrupted_one(
    native_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "RUNS", tmp_path)
    monkeypatch.delenv("PPO_RUN", raising=False)
    cut_back(shutil.copytree(native_run, tmp_path / "deterministic" / "quickstart" / "a"), 1, "interrupted")
    with pytest.raises(UserError, match="PPO_RUN: set it to the folder of a run, or record one"):
        recorded.folder_of("PPO_RUN")
    whole = shutil.copytree(native_run, tmp_path / "deterministic" / "quickstart" / "b")
    assert recorded.folder_of("PPO_RUN") == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_on_other_runs(
    name: str, deterministic_run: Path, native_run: Path, parted_run: Path, tmp_path: Path
) -> None:
    from analysis.execute import executed

    runs = {(0.1, 1): deterministic_run, (0.1, 2): native_run, (0.2, 1): parted_run, (0.2, 2): deterministic_run}
    grid = grid_of(runs, tmp_path / "grid")
    variables = {"PPO_RUN": str(deterministic_run), "PPO_OTHER_RUN": str(native_run), "PPO_GRID": str(grid)}
    # this one runs on few iterations: what warns of a small sample is no fault
    notebook = executed(NOTEBOOKS / f"{name}.ipynb", variables | {"PYTHONWARNINGS": "ignore"})
    found = [fault for fault in faults(notebook) if not fault.startswith("a path of a machine")]
    assert found == []
    assert [cell["source"] for cell in notebook["cells"]] == ["".join(c["source"]) for c in written(name)["cells"]]
