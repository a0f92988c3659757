"""Commands of the analyses, started in a folder that has an `analysis` of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def started(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Start Python in a folder; the checkout is installed, as `make setup` does, or on the path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "command", [("-m", "ppo_repro", "report"), ("-m", "ppo_repro", "analyse", "mismatch")], ids=["report", "mismatch"]
)
def test_a_folder_of_the_users_may_be_called_analysis(
    command: tuple[str, ...], deterministic_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "analysis").mkdir()
    (tmp_path / "analysis" / "__init__.py").write_text("raise RuntimeError('this is mine')\n")
    more = ("--out", tmp_path / "report.html") if command[-1] == "report" else ()
    done = started(tmp_path, *command, deterministic_run, *more)
    assert done.returncode == 0, done.stderr
    control = started(tmp_path, "-c", "import analysis")
    assert control.returncode == 1
    assert "this is mine" in control.stderr
