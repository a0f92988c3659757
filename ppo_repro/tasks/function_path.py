"""`FILE.py:FUNCTION` of a configuration, checked by reading the file: nothing of it is executed."""

from __future__ import annotations

import ast
from pathlib import Path

from ppo_repro.config.reward import CalledReward, RewardConfig
from ppo_repro.errors import UserError
from ppo_repro.mistakes import did_you_mean


def function_paths(config: RewardConfig) -> list[tuple[str, str]]:
    """(field, FILE.py:FUNCTION) of every function in a reward."""
    return [(f"reward.terms.{i}.path", t.path) for i, t in enumerate(config.terms) if isinstance(t, CalledReward)]


def parse(field: str, function: str) -> tuple[Path, str]:
    """File and function of `FILE.py:FUNCTION`; UserError if it has another form or there is no such file."""
    file, colon, name = function.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise UserError(f"{field} = {function!r}: must be FILE.py:FUNCTION")
    if not Path(file).is_file():
        raise UserError(f"{field} = {function!r}: there is no file {file}")
    return Path(file), name


def check_function(field: str, function: str) -> None:
    """UserError as `parse`, for a file that is no Python, and for one that cannot give the function its name."""
    file, name = parse(field, function)
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise UserError(f"{field}: {file}:{error.lineno or 1} fails to load (SyntaxError: {error.msg})") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{field}: {file} cannot be read ({' '.join(str(error).split())}); restore it") from error
    names = _names(tree)
    if names is not None and name not in names:
        meant = did_you_mean(name, sorted(names))
        raise UserError(f"{field} = {function!r}: {file} has no function {name}{meant}")


def _names(tree: ast.Module) -> set[str] | None:
    """Every name that the file binds anywhere; None where it may bind others: by `import *`, `globals` or `exec`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            if node.name == "*":
                return None
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name):
            if node.id in ("globals", "vars", "exec", "setattr", "__getattr__"):
                return None
            names.add(node.id)
    return None if "__getattr__" in names else names
