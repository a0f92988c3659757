"""Where the analyses are: the wheel has them below the package, a checkout beside it. Imported when first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ppo_repro.errors import UserError

# runs or a folder of runs, the page or None for the usual place, responses or None for the usual number; returns the
# page and its size in bytes
WriteReport = Callable[[Sequence[Path], Path | None, int | None], tuple[Path, int]]


def _analysis(command: str, module: str) -> ModuleType:
    home = next((name for name in ("ppo_repro.analysis", "analysis") if find_spec(name)), None)
    if home is None:
        raise UserError(f"{command}: `analysis` is not beside this package; install the wheel, or a checkout")
    return import_module(f"{home}.{module}")


def report_writer() -> WriteReport:
    """`analysis.report.build.write_report`; UserError where the analyses were not installed."""
    writer: WriteReport = _analysis("report", "report.build").write_report
    return writer


def view_server(targets: Sequence[Path], port: int) -> Any:
    """`analysis.view.server.Server`; UserError where it, or a package that it needs, was not installed."""
    for package in ("duckdb", "starlette", "uvicorn"):
        if find_spec(package) is None:
            raise UserError(f"view: needs {package}; install it with pip install 'ppo_repro[view]'")
    return _analysis("view", "view.server").Server(targets, port)
