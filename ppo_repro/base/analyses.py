"""Modules of `ppo_repro.analysis`, imported at their first use: no run needs them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ppo_repro.base.errors import UserError


def analysis(module: str, *packages: str) -> Any:
    """Return a module of the analyses.

    Raises UserError if it, or one of the packages that it needs beside ours, is not installed.
    """
    command = module.partition(".")[0]
    for package in packages:
        if find_spec(package) is None:
            raise UserError(f"{command}: needs {package}; install it with pip install 'ppo_repro[{command}]'")
    try:
        import_module("ppo_repro.analysis")
    except ImportError as error:  # ppo_repro/analysis is a link, which leads nowhere if the package alone was copied
        raise UserError(f"{command}: {error}; install the wheel, or a whole checkout") from error
    return import_module(f"ppo_repro.analysis.{module}")
