"""Modules of `analysis`, which is beside this package in a checkout and inside it in a wheel."""

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
    home = next((name for name in ("ppo_repro.analysis", "analysis") if find_spec(name)), None)
    if home is None:
        raise UserError(f"{command}: `analysis` is not beside this package; install the wheel, or a checkout")
    return import_module(f"{home}.{module}")
