"""Write the HTML report of one run, of two runs side by side, or of a folder of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ppo_repro.analysis.report.data.run_facts import read_facts
from ppo_repro.analysis.report.dpo_page import dpo_page
from ppo_repro.analysis.report.run_page import run_page
from ppo_repro.analysis.report.runs_page import runs_page
from ppo_repro.analysis.report.two_runs_page import two_runs_page
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, atomic_write, require_ours
from ppo_repro.config.files import DPO
from ppo_repro.records import manifest

RESPONSES = 60
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
        for run_dir in targets:
            if manifest.load_head(run_dir).kind == DPO:
                raise UserError(f"{run_dir}: is a DPO run; a page about two runs compares language or control runs")
        text = two_runs_page(*targets)
    elif (targets[0] / MANIFEST).exists() or not targets[0].is_dir():
        text = page_of(targets[0])
    else:
        text = runs_page(targets[0], path.parent if out is None else None)
    data = text.encode()
    atomic_write(path, data)
    return path, len(data)


def page_of(run_dir: Path, responses: int = RESPONSES) -> str:
    """Return the report of one run of any kind as HTML; equal records give equal bytes.

    The page of a language run shows up to `responses` responses token by token.
    """
    facts = read_facts(run_dir)
    if facts.manifest.kind == DPO:
        return dpo_page(facts)
    return run_page(facts, responses)
