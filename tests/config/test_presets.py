"""The presets run, and one says what its document means."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.analysis.mismatch.parity import parity
from ppo_repro.config.files import load_config
from tests.support.language import run
from tests.support.paths import ROOT

EXPERIMENTS = ROOT / "experiments"
PRESETS = sorted((EXPERIMENTS / "presets").glob("*.yaml"))


def test_a_preset_says_what_its_document_says() -> None:
    """The chapter's `whiten_rewards` whitens rewards, and its `target_kl` is the target of the adaptive KL."""
    written = load_config(EXPERIMENTS / "presets" / "book_trl.yaml").model_dump()
    assert written["reward"]["whiten"] == "scale"
    assert written["kl"]["controller"]["target_kl"] == 6.0
    assert written["ppo"]["early_stop_kl"] is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [*PRESETS, EXPERIMENTS / "four_models.yaml"], ids=lambda p: p.stem)
def test_a_preset_runs_and_keeps_parity(path: Path, tmp_path: Path) -> None:
    """Two iterations from weights as they are made: what is promised holds for any weights."""
    config = load_config(path, ["ppo.iterations=2", "model.warm_start_steps=0"])
    found = parity(run(config, tmp_path)[0])
    assert found.tokens > 0
    assert (found.unequal_old_rollout_logprobs, found.unequal_first_ratios, found.unequal_values) == (0, 0, 0)
