"""The presets load, say what their documents say, and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.analysis.agreement import run_agreement
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from tests.support.language import run
from tests.support.paths import ROOT

EXPERIMENTS = ROOT / "experiments"
PRESETS = sorted((EXPERIMENTS / "presets").glob("*.yaml"))


def value_at(config: RunConfig, path: str) -> object:
    found: object = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


# document by document, what its table or listing states
STATED: dict[str, dict[str, object]] = {
    "book_chat_step": {
        "sequences_per_iteration": 128, "rollout.temperature": 0.7, "rollout.top_p": 0.9, "kl.kl_coef": 0.05,
        "kl.charge": "last_mean", "advantages.whiten": "full", "ppo.epochs": 4, "ppo.minibatch_size": 16,
        "ppo.objective.clip_range": 0.2, "ppo.max_grad_norm": 1.0,
    },
    "book_trl": {
        "ppo.learning_rate": 1.5e-6, "sequences_per_iteration": 128, "ppo.epochs": 4,
        "ppo.minibatch_size": 16 * 4,  # mini_batch_size times gradient_accumulation_steps
        "layout.update_micro_batch": 16,
        "advantages.gamma": 1.0, "advantages.gae_lambda": 0.95, "ppo.objective.clip_range": 0.2,
        "value.clip_range": 0.2, "value.value_coef": 0.1, "kl.kl_coef": 0.05, "kl.controller.target_kl": 6.0,
        "reward.whiten": "scale",
        "ppo.max_grad_norm": 1.0, "rollout.temperature": 0.7, "rollout.top_p": 0.9,
    },
    "recontextualizing": {
        "advantages.gamma": 0.99, "advantages.gae_lambda": 0.95, "ppo.objective.clip_range": 0.2,
        "ppo.entropy_coef": 0.01, "kl.placement": "loss", "kl.kl_coef": 0.1, "ppo.aggregation": "sequence_mean",
        "value.clip_range": None,
    },
    "workhorse": {
        "ppo.learning_rate": 1e-6, "value.learning_rate": 1e-5, "ppo.epochs": 4, "ppo.minibatch_size": 128,
        "sequences_per_iteration": 128, "advantages.gamma": 1.0, "advantages.gae_lambda": 0.95,
        "ppo.objective.clip_range": 0.2, "value.clip_range": 0.2, "kl.kl_coef": 0.1, "ppo.early_stop_kl": 0.015,
        "ppo.max_grad_norm": 0.5, "rollout.temperature": 1.0,
    },
    "instructgpt": {
        "value.init": "reward_model", "kl.placement": "reward", "kl.charge": "token", "kl.kl_coef": 0.02,
        "ppo.objective.clip_range": 0.2, "advantages.kind": "gae",
    },
    "grpo": {
        "advantages.kind": "group", "advantages.scale": True, "kl.placement": "loss", "kl.estimator": "k3",
        "kl.kl_coef": 0.04, "ppo.aggregation": "sequence_mean", "value.kind": "none",
    },
    "dapo": {
        "ppo.objective.clip_range": 0.2, "ppo.objective.clip_range_high": 0.28, "ppo.aggregation": "token_mean",
        "advantages.kind": "group", "kl.placement": "none",
    },
    "gspo": {
        "ppo.objective.kind": "sequence_clip", "ppo.objective.clip_range": 3e-4, "ppo.objective.clip_range_high": 4e-4,
        "ppo.aggregation": "sequence_mean", "advantages.kind": "group", "kl.placement": "none",
        "sequences_per_iteration": 256, "ppo.minibatch_size": 256 // 4,
    },
    "icepop": {
        "ppo.ratio_anchor": "old", "ppo.importance_weights.kind": "masked", "ppo.importance_weights.level": "token",
        "ppo.importance_weights.floor": 0.5, "ppo.importance_weights.cap": 5.0, "ppo.rejected_tokens": "counted",
        "advantages.kind": "group",
    },
    "decoupled": {
        "ppo.ratio_anchor": "old", "ppo.objective.clip_range": 0.4, "ppo.importance_weights.kind": "masked",
        "ppo.importance_weights.floor": 0.0, "ppo.importance_weights.cap": 5.0, "kl.placement": "none",
        "sequences_per_iteration": 256, "ppo.minibatch_size": 256, "advantages.kind": "group",
    },
}  # fmt: skip


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_a_preset_says_what_its_document_says(path: Path) -> None:
    config = load_config(path)
    assert config.experiment == path.stem
    assert {name: value_at(config, name) for name in STATED[path.stem]} == STATED[path.stem]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [*PRESETS, EXPERIMENTS / "four_models.yaml"], ids=lambda p: p.stem)
def test_a_preset_runs_and_keeps_agreement(path: Path, tmp_path: Path) -> None:
    """Two iterations from weights as they are made: what is promised holds for any weights."""
    config = load_config(path, ["ppo.iterations=2", "model.warm_start_steps=0"])
    found = run_agreement(run(config, tmp_path)[0])
    assert found.tokens > 0
    assert (found.unequal_old_rollout_logprobs, found.unequal_first_ratios, found.unequal_values) == (0, 0, 0)
