"""Find the modules beside a Python file of the user, which belong to the file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# names that are never looked up beside a file
_ELSEWHERE = frozenset(sys.stdlib_module_names) | {"ppo_repro"}


def modules_beside(file: Path) -> tuple[Path, ...]:
    """Return the files beside a file that it imports, directly or through other modules, sorted by name.

    All Python files of an imported package count. A file that cannot be parsed imports nothing; loading reports its
    error.
    """
    folder, modules, left = file.parent, set[Path](), [file]
    while left:
        for name in _imported(left.pop()):
            if is_beside(folder, name):
                module = folder / f"{name}.py"
                new = {module} if module.is_file() else set((folder / name).rglob("*.py"))
                left += new - modules
                modules |= new
    return tuple(sorted(modules - {file}))


def _imported(file: Path) -> Iterator[str]:
    """Yield the first name of each module that a file imports, anywhere in its code."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):  # from . import
            yield from (alias.name for alias in node.names)


def is_beside(folder: Path, name: str) -> bool:
    """Return whether a file in a folder gets the module `name` from that folder."""
    if name in _ELSEWHERE:
        return False
    if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
        return True
    # a folder without __init__.py is a package if there is no other one, as for Python
    if not any((folder / name).glob("*.py")):
        return False
    installed = find_spec(name)
    return installed is None or installed.origin is None
