"""The notebooks run from top to bottom on small runs, and every cell that ends in a table shows one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pandas as pd
import pytest

from tests.support.paths import ROOT

NOTEBOOKS = ROOT / "analysis" / "notebooks"
SHOWN = {"clipping": 6, "comparing_runs": 3, "mismatch": 4, "tokenization": 5}


def cells(path: Path) -> list[str]:
    """The code cells of a percent-format notebook; nothing may precede the first marker."""
    before, *parts = re.split(r"^# %%(.*)$", path.read_text(), flags=re.MULTILINE)
    assert not before.strip()
    kinds, bodies = parts[::2], parts[1::2]
    for kind, body in zip(kinds, bodies, strict=True):
        assert kind.strip() in ("", "[markdown]")
        if kind.strip():
            assert all(line.startswith("#") for line in body.strip().splitlines()), f"{path.name}: code in text"
    return [body for kind, body in zip(kinds, bodies, strict=True) if not kind.strip()]


def shown_by(code: str, names: dict[str, object], path: Path) -> object:
    """Run one cell as Jupyter does: the value of its last line where that is an expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, path, "exec"), names)
    return eval(compile(ast.Expression(last.value), path, "eval"), names) if isinstance(last, ast.Expr) else None


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_a_notebook_runs(name: str, native_run: Path, parted_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_RUN", str(native_run))
    monkeypatch.setenv("PPO_OTHER_RUN", str(parted_run))
    path = NOTEBOOKS / f"{name}.py"
    names: dict[str, object] = {"__name__": "__main__"}
    values = [shown_by(code, names, path) for code in cells(path)]
    tables = [value for value in values if value is not None]
    assert all(isinstance(table, pd.DataFrame) and len(table) for table in tables)
    assert len(tables) == SHOWN[name]
