"""Who may import what: the rules that keep rooms apart, read from the source."""

import ast
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

STANDARD = set(sys.stdlib_module_names) | {"__future__"}


def imports(path: Path) -> set[str]:
    """Every module a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def top(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def files(pattern: str) -> list[Path]:
    found = sorted(ROOT.glob(pattern))
    assert found, pattern
    return found


FOUNDATIONS = [
    *(
        "config",
        "config_algorithm",
        "config_engine",
        "config_reward",
        "config_section",
        "config_yaml",
        "config_dpo",
        "control/config",
    ),
    *("seeding", "records/schema", "records/control_schema", "errors"),
]


@pytest.mark.parametrize("name", FOUNDATIONS)
def test_foundations_need_little(name: str) -> None:
    allowed = STANDARD | {"numpy", "pydantic", "pydantic_core", "yaml", "ppo_repro"}
    assert top(imports(ROOT / "ppo_repro" / f"{name}.py")) <= allowed


@pytest.mark.parametrize("path", files("ppo_repro/ppo/*.py"), ids=lambda p: p.name)
def test_ppo_mathematics_know_no_config_and_no_model(path: Path) -> None:
    if path.name in {"update.py", "objective.py", "__init__.py"}:
        return
    ours = {name for name in imports(path) if name.startswith("ppo_repro")}
    assert all(name.startswith(("ppo_repro.ppo", "ppo_repro.numerics")) for name in ours)
    assert "transformers" not in top(imports(path))


@pytest.mark.parametrize("path", files("analysis/**/*.py"), ids=lambda p: p.name)
def test_analyses_read_records_only(path: Path) -> None:
    names = imports(path)
    assert not {"torch", "transformers", "mlflow"} & top(names)
    ours = {name for name in names if name.startswith("ppo_repro")}
    allowed = ("ppo_repro.records", "ppo_repro.errors", "ppo_repro.config.run")  # the last: what the run was told to do
    assert all(name.startswith(allowed) for name in ours)


@pytest.mark.parametrize("path", files("ppo_repro/**/*.py"), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_update_takes_optimizer_steps(path: Path) -> None:
    text = path.read_text()
    if path.name not in {"update.py", "warm_start.py", "preference_training.py", "probe.py", "optimizer.py"}:
        assert "optimizer.step(" not in text
    assert "mlflow" not in top(imports(path)) or path.name == "tracking.py"
    assert "sglang" not in top(imports(path)) or path.parent.name == "sglang_plugin"
    assert "gymnasium" not in top(imports(path)) or path.name == "environments.py"


@pytest.mark.parametrize("path", files("ppo_repro/**/*.py") + files("analysis/**/*.py"), ids=lambda p: p.name)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno <= 60, f"{path.name}: {node.name}"
