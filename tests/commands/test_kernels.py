"""Kernels compiled ahead of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels.core.cache import cache_folder
from ppo_repro.numerics.proof import proof
from tests.support.cli import Cli, one_line
from tests.support.paths import ROOT, SMALL


def test_compile_names_the_folder_and_what_is_in_it(cli: Cli) -> None:
    code, out, _ = cli("compile", "--backend", "float64", "--json")
    value = json.loads(out)
    assert code == 0 and value["backend"] == "float64" and value["folder"] == str(cache_folder())
    assert value["entries"] > 0 and value["bytes"] > 0
    code, out, _ = cli("compile", "--backend", "float64")
    assert code == 0 and "float64 gives the bits of the specification" in out and str(cache_folder()) in out


def test_compile_ends_with_one_where_kernels_are_wrong(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "failure", lambda name: "products")
    code, _, err = cli("compile", "--backend", "float64")
    assert code == 1 and err.splitlines()[-1].startswith("promise broken: products of backend float64 differ")


def test_compile_for_another_processor_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_amx", lambda: False)
    code, _, err = cli("compile", "--backend", "amx")
    assert code == 2 and "this CPU has no AMX" in one_line(err)


@pytest.mark.slow
@pytest.mark.timeout(900)  # everything is compiled once
def test_a_run_after_compile_compiles_nothing_more(tmp_path: Path) -> None:
    """Into an empty folder, by two processes where there are two cores; the proof is not repeated by the run."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    program = [sys.executable, "-m", "ppo_repro"]
    done = subprocess.run(
        [*program, "compile", "--json"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    folder = Path(json.loads(done.stdout)["folder"])
    assert folder.is_relative_to(tmp_path) and "first use here" in done.stderr
    before = {entry.name for entry in folder.iterdir()}
    options = ["--out", str(tmp_path / "runs"), "--set", "ppo.iterations=1", "--json"]
    run = subprocess.run(
        [*program, "run", str(SMALL), *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "first use here" not in run.stderr
    more = {entry.name for entry in folder.iterdir()} - before
    assert not more
