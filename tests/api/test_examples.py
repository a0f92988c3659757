"""The examples in the docstrings of the library's names run, and the names load nothing heavy before they are used."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ppo_repro
from tests.support.paths import ROOT
from tests.support.runs import small_config

NAMES = ("diff", "generate", "open_run", "train")


@pytest.mark.parametrize("name", NAMES)
def test_the_example_in_a_docstring_runs(name: str, deterministic_run: Path, tmp_path: Path) -> None:
    function = getattr(ppo_repro, name)
    names = {
        **import_module(function.__module__).__dict__,
        "EXAMPLE_RUN": deterministic_run,
        "EXAMPLE_CONFIG": small_config("ppo.iterations=1", "model.warm_start_steps=50").model_dump(mode="json"),
        "EXAMPLE_OUT": tmp_path,
    }
    (example,) = (e for e in doctest.DocTestFinder(recurse=False).find(function, name, globs=names) if e.examples)
    assert "import ppo_repro" in example.examples[0].source or "ppo_repro" in example.examples[0].source
    found = doctest.DocTestRunner().run(example)
    assert found.attempted >= 2
    assert not found.failed


def test_the_example_of_the_readme_runs(deterministic_run: Path) -> None:
    """On the policy of a small run in place of SmolLM2; its last line compares every log-prob."""
    text = (ROOT / "ppo_repro" / "api" / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert example.count('"models/smollm2"') == 1
    assert example.rstrip().splitlines()[-1].startswith("assert ")
    names: dict[str, Any] = {}
    exec(example.replace("models/smollm2", str(deterministic_run / "checkpoints" / "final")), names)
    assert all(bool(p.grad.abs().sum() > 0) for p in names["model"].parameters())
    assert len(names["again"]) == len(names["response"].response_ids) > 0


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, ppo_repro; dir(ppo_repro); print({'torch', 'pandas', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"
    used = code.replace("dir(ppo_repro)", "ppo_repro.open_run")  # the control: the names are found by a real import
    done = subprocess.run([sys.executable, "-c", used], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "pandas" in done.stdout
    assert "torch" not in done.stdout
