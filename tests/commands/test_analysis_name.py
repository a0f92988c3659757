"""Commands of the analyses, started in a folder that has an `analysis` of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def started(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Start Python in a folder; the checkout is installed, as `make setup` does, or on the path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_folder_of_the_users_may_be_called_analysis(deterministic_run: Path, tmp_path: Path) -> None:
    (tmp_path / "analysis").mkdir()
    (tmp_path / "analysis" / "__init__.py").write_text("raise RuntimeError('this is mine')\n")
    done = started(tmp_path, "-m", "ppo_repro", "analyse", "mismatch", deterministic_run)
    assert done.returncode == 0, done.stderr
    control = started(tmp_path, "-c", "import analysis")
    assert control.returncode == 1
    assert "this is mine" in control.stderr


def test_the_package_imports_nothing_by_that_name() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "ppo_repro").rglob("*.py"))
    assert not re.findall(r"^ *(?:from|import) analysis\b.*", text, re.MULTILINE)
    assert re.search(r"^ *from ppo_repro\.analysis\b", text, re.MULTILINE), "the control"
