"""Whole runs of every dense family that the package makes: PPO with adapters and a reward model, an audit, DPO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from ppo_repro.analysis.agreement import run_agreement
from ppo_repro.base.watcher import Silent
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import read_tree, validated
from ppo_repro.config.model import DenseFamily
from ppo_repro.records import manifest
from ppo_repro.runs.dpo import DPOKind
from ppo_repro.runs.rerun import rerun
from ppo_repro.runs.run import run
from tests.support import language
from tests.support.cli import Cli
from tests.support.recipes import UNPADDED_LAYOUT
from tests.support.runs import DPO

SIZE = (
    *("model.hidden_size=32", "model.num_layers=2", "model.warm_start_steps=10", "numerics.max_context=24"),
    *("ppo.iterations=1", "rollout.prompts_per_iteration=10", "rollout.samples_per_prompt=4", "ppo.minibatch_size=20"),
)
ADAPTERS = "lora={rank: 2, alpha: 4}", "value={learning_rate: 1e-3, lora: {rank: 2, alpha: 2}}", "checkpoints.every=1"
TRAINED = "reward.terms=[{kind: trained_model, num_pairs: 12, minibatch_size: 6, learning_rate: 1e-3}]"
ANOTHER = ("layout.padding=left", "layout.update_micro_batch=4")
QUICK = "gemma3_text"
FAMILIES = [f if f == QUICK else pytest.param(f, marks=pytest.mark.slow) for f in get_args(DenseFamily)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_audited_and_preferred(family: str, tmp_path: Path, cli: Cli) -> None:
    judged = TRAINED
    if family == "granite":  # transformers has no classifier of it
        (tmp_path / "reward.py").write_text("def score(response):\n    return float(sum(map(ord, response)) % 5)\n")
        judged = f"reward.terms=[{{kind: function, path: '{tmp_path}/reward.py:score'}}]"
    made = language.tiny_run(tmp_path / "ppo", f"model.family={family}", *SIZE, *ADAPTERS, judged)
    assert manifest.load(made).status == "complete"
    found = run_agreement(made)
    assert found.tokens > 20
    assert (found.unequal_old_rollout_logprobs, found.unequal_first_ratios, found.unequal_values) == (0, 0, 0)
    assert language.rerun(made, UNPADDED_LAYOUT).difference is None
    assert cli.done("audit", made).splitlines()[-1] == "verdict: both sides are right"
    (tmp_path / "dpo.yaml").write_text(DPO.format(run=json.dumps(str(made))))
    config = validated(DPOConfig, read_tree(tmp_path / "dpo.yaml", ["num_eval_prompts=2"]), "dpo")
    preferred, _ = run(DPOKind(Silent()), config, tmp_path / "dpo")
    assert rerun(DPOKind(Silent()), preferred, ANOTHER).difference is None
