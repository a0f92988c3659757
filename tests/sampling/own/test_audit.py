"""`ppo-repro audit RUN` judges the engine of a run, by the weights that it was to sample with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import Cli
from tests.support.language import run, small_run
from tests.support.own_engine import config_of, written


def test_the_built_in_engine_is_right_in_the_newest_iteration_with_weights(
    cli: Cli, deterministic_run: Path, tmp_path: Path
) -> None:
    run_dir = small_run(tmp_path, "ppo.iterations=2", "checkpoints.every=1", "rollout.temperature=0.7")
    code, out, err = cli("audit", run_dir, "--responses", "8", "--json")
    assert code == 0
    assert json.loads(out)["sampler"]["is_right"]
    assert f"{run_dir}: iteration 1, both sides" in err


def test_an_engine_that_ignores_the_distribution_is_wrong(cli: Cli, tmp_path: Path) -> None:
    run_dir, _ = run(config_of(written(tmp_path), "ppo.iterations=1", "checkpoints.every=1"), tmp_path)
    code, out, _ = cli("audit", run_dir, "--responses", "8", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["trainer"]["is_right"]
    assert not found["sampler"]["is_right"]


@pytest.mark.parametrize("option", ["--model=x", "--temperature=0.5", "--top-k=3"])
def test_what_the_run_says_is_no_option(cli: Cli, deterministic_run: Path, option: str) -> None:
    said = cli.refusal("audit", deterministic_run, option)
    assert said.endswith(f"{deterministic_run} is a run, which has it; leave it out")


def test_a_run_without_its_weights_is_one_line(cli: Cli, tmp_path: Path) -> None:
    run_dir, _ = run(config_of(written(tmp_path), "ppo.iterations=1"), tmp_path)
    assert "kept no weights that it sampled with; run it with checkpoints.every = 1" in cli.refusal("audit", run_dir)
