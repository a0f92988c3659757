"""Agreement, replay and independence of the layout hold under the options that users combine most."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.analysis.agreement import run_agreement
from ppo_repro.records import reader
from tests.support.language import tiny_run
from tests.support.recipes import OTHER_LAYOUT, RECIPES
from tests.support.runs import recomputed


@pytest.mark.parametrize("name", ["ppo", *(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES if n != "ppo")])
def test_agreement_replay_and_layout_hold(name: str, tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path / "first", *RECIPES[name])
    found = run_agreement(run_dir)
    assert found.tokens > 30
    assert found.first_minibatch_tokens > 3
    assert (found.unequal_old_rollout_logprobs, found.unequal_first_ratios, found.unequal_values) == (0, 0, 0)
    found_again = recomputed(run_dir)
    assert found_again.difference is None, found_again.lines()
    assert min(found_again.compared.values()) >= 2, found_again.lines()
    again = tiny_run(tmp_path / "again", *RECIPES[name], *OTHER_LAYOUT)
    assert reader.open_manifest(again).fingerprint == reader.open_manifest(run_dir).fingerprint
    steps = reader.read_steps(run_dir)
    assert steps["policy_digest"].nunique() > 1, "the policy learnt nothing, so nothing was compared"
    assert (steps["value_digest"].isna().all()) == ("value={kind: none}" in RECIPES[name])
