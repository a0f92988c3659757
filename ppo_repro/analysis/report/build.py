"""Write the HTML report of one run, of two runs side by side, or of a folder of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ppo_repro.analysis.report.run_page import run_page
from ppo_repro.analysis.report.runs_page import runs_page
from ppo_repro.analysis.report.two_runs_page import two_runs_page
from ppo_repro.base.files import MANIFEST, atomic_write, require_ours

COMPARISON_NAME = "comparison.html"


def write_report(targets: Sequence[Path], out: Path | None = None) -> tuple[Path, int]:
    """Write the report of one run, two runs or a folder of runs, and return the path and the size in bytes.

    None selects the default path. Raises UserError if records are missing or damaged, or if `out` is a file of another
    program.
    """
    usual = Path(COMPARISON_NAME) if len(targets) == 2 else targets[0] / "report.html"
    path = usual if out is None else out
    if targets[0].is_dir():
        require_ours(path)
    if len(targets) == 2:
        text = two_runs_page(*targets)
    elif (targets[0] / MANIFEST).exists() or not targets[0].is_dir():
        text = run_page(targets[0])
    else:
        text = runs_page(targets[0], path.parent if out is None else None)
    data = text.encode()
    atomic_write(path, data)
    return path, len(data)
