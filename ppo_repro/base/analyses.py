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
    try:
        home = import_module("ppo_repro.analysis").__name__  # in a checkout `analysis`
    except ImportError as error:
        raise UserError(f"{command}: {error}; install the wheel, or a whole checkout") from error
    return import_module(f"{home}.{module}")
