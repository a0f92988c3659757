"""Builds the HTML file of a recorded run, of two side by side, or of a folder of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.report.drawing.page import BEGINNING, EARLIER_BEGINNING
from analysis.report.pages.control import control_page
from analysis.report.pages.dpo import dpo_page
from analysis.report.pages.grid import grid_page, runs_below
from analysis.report.pages.pair import pair_page
from analysis.report.pages.run import run_page
from analysis.report.reading.facts import ControlFacts, read_facts
from ppo_repro.config.kinds import DPO
from ppo_repro.errors import UserError
from ppo_repro.files import OwnKind, check_replaceable, write_over_earlier
from ppo_repro.records import manifest

DEFAULT_RESPONSES = 60
COMPARISON_NAME = "comparison.html"
REPORT = OwnKind("report", (BEGINNING.encode(), EARLIER_BEGINNING.encode()))


def write_report(targets: Sequence[Path], out: Path | None, responses: int | None) -> tuple[Path, int]:
    """Write the report of one or two runs, or of a folder of runs; return its path and its size in bytes.

    UserError where something is missing or damaged, an option has no meaning for such a page, or what is at `out`
    is no earlier report.
    """
    usual = Path(COMPARISON_NAME) if len(targets) == 2 else targets[0] / "report.html"
    path = usual if out is None else out
    check_replaceable(path, REPORT)  # before the page, which takes seconds
    data = _text(targets, responses).encode()
    write_over_earlier(path, REPORT, data)
    return path, len(data)


def _text(targets: Sequence[Path], responses: int | None) -> str:
    if len(targets) == 2:
        _require_no_tokens(responses, "a page about two runs")
        for run_dir in targets:
            if manifest.load_head(run_dir).kind == DPO:
                raise UserError(f"{run_dir}: is a DPO run; a page about two runs compares language or control runs")
        return pair_page(targets[0], targets[1])
    if (targets[0] / manifest.FILE_NAME).exists() or not targets[0].is_dir():
        return page_of(targets[0], responses)
    _require_no_tokens(responses, "a grid")
    return grid_page(targets[0], runs_below(targets[0]))


def page_of(run_dir: Path, responses: int | None) -> str:
    """The report of one run of any kind as HTML; the same records give the same bytes."""
    if manifest.load_head(run_dir).kind == DPO:
        _require_no_tokens(responses, "a DPO run")
        return dpo_page(run_dir)
    facts = read_facts(run_dir)
    if isinstance(facts, ControlFacts):
        _require_no_tokens(responses, "a control run")
        return control_page(facts)
    return run_page(facts, DEFAULT_RESPONSES if responses is None else responses)


def _require_no_tokens(responses: int | None, what: str) -> None:
    if responses is not None:
        raise UserError(f"--responses {responses}: {what} has no token view; give the folder of one language run")
