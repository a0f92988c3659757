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
from tests.support.runs import REWARD_MODEL

# the same work cut up in another way
OTHER_LAYOUT = (
    *("layout.rollout_slots=2", "layout.prefill_chunk=2", "layout.forward_micro_batch=2"),
    *("layout.update_micro_batch=1", "layout.padding=left", "layout.prefix_cache=false"),
)
RECIPES: dict[str, tuple[str, ...]] = {
    "ppo": (
        "value={learning_rate: 1e-3, epochs: 3, clip_range: null, normalize_returns: true}",
        *("advantages.gae_lambda=1", "advantages.whiten=scale", "reward.whiten=full", "ppo.schedule=cosine"),
        "kl={charge: word, estimator: k3, direction: reference_policy}",
        *("rollout.temperature=0.7", "rollout.top_p=0.9", "layout.gradient_checkpointing=true"),
    ),
    "grpo": (
        *("value={kind: none}", "advantages={kind: group}", "kl={placement: loss, estimator: k2}"),
        *("ppo.objective={clip_range: 0.1, clip_range_high: 0.3, dual_clip: 2.0}", "ppo.aggregation=sequence_mean"),
        *("ppo.ratio_anchor=old", "ppo.importance_weights={kind: truncated}", "rollout.top_k=4"),
    ),
    "gspo": (
        *("value={kind: none}", "advantages={kind: group, scale: false}", "kl={placement: none}"),
        *("ppo.objective={kind: sequence_clip, clip_range: 0.01}", "ppo.ratio_anchor=old"),
        *("ppo.importance_weights={kind: masked, level: sequence}", "reward.missing_eos_penalty=0.5"),
        "lora={rank: 2, alpha: 4.0}",
    ),
    "head": (
        *("value={kind: head, value_coef: 0.5}", "kl={placement: loss, estimator: exact}"),
        *("ppo.objective={kind: kl_cov, share: 0.2}", "ppo.aggregation=sequence_sum", "ppo.warmup_iterations=1"),
        "ppo.rejection=[{kind: ratio, low: 0.5, high: 2}, {kind: veto}, {kind: divergence, above: 1}]",
        *("ppo.rejected_tokens=left_out", "layout.gradient_checkpointing=true"),
    ),
    "reward model": (
        f"reward.terms=[{REWARD_MODEL}]",
        *("value={init: reward_model, learning_rate: 1e-3, lora: {rank: 2, alpha: 4.0}}", "lora={rank: 2, alpha: 4.0}"),
        *("ppo.objective={kind: adaptive_clip, target_kl: 0.01}", "ppo.early_stop_kl=1e-9"),
        "kl={charge: last_mean, estimator: exact, controller: {kind: adaptive, target_kl: 0.5}}",
    ),
}


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
