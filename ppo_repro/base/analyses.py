"""Imports of modules of `ppo_repro.analysis` at their first use, because no run needs them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ppo_repro.base.errors import UserError


def analysis(module: str, *packages: str) -> Any:
    """Import a module of `ppo_repro.analysis` and return it.

    Raises UserError if the module, or one of the other `packages` that it needs, is not installed.
    """
    command = module.partition(".")[0]
    for package in packages:
        if find_spec(package) is None:
            raise UserError(f"{command}: needs {package}; install it with pip install 'ppo_repro[{command}]'")
    return import_module(f"ppo_repro.analysis.{module}")
