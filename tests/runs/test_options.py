"""Parity, replay and independence of the layout hold under the options that users combine most."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.analysis.mismatch.parity import parity
from ppo_repro.base.watcher import Silent
from ppo_repro.checks.replay import STAGES, lines, recompute
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.records import reader
from tests.support.language import run
from tests.support.paths import TINY
from tests.support.recipes import OTHER_LAYOUT, RECIPES


def recorded(name: str, out: Path, *more: str) -> tuple[RunConfig, Path]:
    config = load_config(TINY, [*RECIPES[name], *more])
    return config, run(config, out, Silent())[0]


@pytest.mark.parametrize("name", ["ppo", *(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES if n != "ppo")])
def test_parity_replay_and_layout_hold(name: str, tmp_path: Path) -> None:
    config, run_dir = recorded(name, tmp_path / "first")
    found = parity(run_dir)
    assert found.tokens > 30
    assert found.first_minibatch_tokens > 3
    assert (found.unequal_old_rollout_logprobs, found.unequal_first_ratios, found.unequal_values) == (0, 0, 0)
    replayed = recompute(run_dir, STAGES)
    assert replayed.difference is None, lines(replayed)
    assert min(replayed.compared.values()) >= 2, lines(replayed)
    _, again = recorded(name, tmp_path / "again", *OTHER_LAYOUT)
    assert reader.open_manifest(again).fingerprint == reader.open_manifest(run_dir).fingerprint
    steps = reader.read_steps(run_dir)
    assert steps["policy_digest"].nunique() > 1, "the policy learnt nothing, so nothing was compared"
    assert (steps["value_digest"].isna().all()) == (config.value.kind == "none")
