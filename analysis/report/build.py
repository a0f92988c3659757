"""Write the HTML report of one run, of two runs side by side, or of a folder of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ppo_repro.analysis.report.facts import read_facts
from ppo_repro.analysis.report.pair_page import pair_page
from ppo_repro.analysis.report.run_page import dpo_page, run_page
from ppo_repro.analysis.report.runs_page import runs_page
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import atomic_write, require_ours
from ppo_repro.config.files import DPO
from ppo_repro.records import manifest

DEFAULT_RESPONSES = 60
COMPARISON_NAME = "comparison.html"


def write_report(targets: Sequence[Path], out: Path | None, responses: int | None) -> tuple[Path, int]:
    """Write the report of one run, two runs or a folder of runs, and return the path and the size in bytes.

    `responses` is the number of responses to show token by token. None selects the default path or number. Raises
    UserError if records are missing or damaged, if `responses` is given for a page that shows no tokens, or if `out` is
    a file of another program.
    """
    usual = Path(COMPARISON_NAME) if len(targets) == 2 else targets[0] / "report.html"
    path = usual if out is None else out
    if targets[0].is_dir():
        require_ours(path)
    if len(targets) == 2:
        _require_no_tokens(responses, "a page about two runs")
        for run_dir in targets:
            if manifest.load_head(run_dir).kind == DPO:
                raise UserError(f"{run_dir}: is a DPO run; a page about two runs compares language or control runs")
        text = pair_page(*targets)
    elif (targets[0] / manifest.FILE_NAME).exists() or not targets[0].is_dir():
        text = page_of(targets[0], responses)
    else:
        _require_no_tokens(responses, "a grid")
        text = runs_page(targets[0], path.parent if out is None else None)
    data = text.encode()
    atomic_write(path, data)
    return path, len(data)


def page_of(run_dir: Path, responses: int | None) -> str:
    """Return the report of one run of any kind as HTML; equal records give equal bytes."""
    facts = read_facts(run_dir)
    if facts.manifest.kind == DPO:
        _require_no_tokens(responses, "a DPO run")
        return dpo_page(facts)
    if facts.is_control:
        _require_no_tokens(responses, "a control run")
    return run_page(facts, DEFAULT_RESPONSES if responses is None else responses)


def _require_no_tokens(responses: int | None, what: str) -> None:
    if responses is not None:
        raise UserError(f"--responses {responses}: {what} has no token view; give the folder of one language run")
