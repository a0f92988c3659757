"""Every configuration, grid and program of the experiments can be loaded; a configuration is written and reads back."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from ppo_repro.config.files import build_config, dump_yaml, load_any, load_config
from ppo_repro.config.yaml_text import parse_yaml
from ppo_repro.grids.spec import load_grid
from tests.support.paths import ROOT

FILES = sorted(path for path in (ROOT / "experiments").rglob("*.yaml"))
STUDIES = sorted(path.parent.name for path in (ROOT / "experiments").glob("*/answer.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_loads(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if "\naxes:" in text:
        assert len(load_grid(path).cells) > 1
    elif "\nenvironment:" in text:
        load_any(path)
    elif path.stem == "dpo":
        load_any(path, ["run=RUN"])
    else:
        config = load_config(path)
        assert build_config(parse_yaml(dump_yaml(config)), "file") == config


@pytest.mark.parametrize("study", STUDIES)
def test_the_program_of_a_study_loads(study: str) -> None:
    importlib.import_module(f"experiments.{study}.answer")
