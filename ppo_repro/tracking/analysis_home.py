"""Where the analyses are: the wheel has them below the package, a checkout beside it. Imported when first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ppo_repro.errors import UserError

# runs or a folder of runs, the page or None for the usual place, responses or None for the usual number; returns the
# page and its size in bytes
WriteReport = Callable[[Sequence[Path], Path | None, int | None], tuple[Path, int]]


def report_writer() -> WriteReport:
    """`analysis.report.build.write_report`; UserError where the analyses were not installed."""
    home = next((name for name in ("ppo_repro.analysis", "analysis") if find_spec(name)), None)
    if home is None:
        raise UserError("report: `analysis` is not beside this package; install the wheel, or a checkout")
    writer: WriteReport = import_module(f"{home}.report.build").write_report
    return writer
