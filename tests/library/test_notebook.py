"""`train` in Python: what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

import ppo_repro
from tests.support.runs import small_config


def test_a_run_says_what_it_is_at_a_prompt(deterministic_run: Path, tmp_path: Path) -> None:
    run = ppo_repro.open_run(deterministic_run)
    assert repr(run).startswith(f"<run {deterministic_run}; complete, 3 iterations; ")
    assert f"fingerprint {run.fingerprint[:12]}>" in repr(run)
    nowhere = ppo_repro.Run(tmp_path / "<nowhere>")
    assert "no such folder" in repr(nowhere)


def test_progress_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = small_config("ppo.iterations=1", "ppo.epochs=1", "model.warm_start_steps=10").model_dump(mode="json")
    ppo_repro.train({**tree, "seed": 2}, out=tmp_path)
    assert "iteration 1/1: score" in capsys.readouterr().err
