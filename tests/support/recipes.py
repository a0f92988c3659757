"""The options that users combine most, for `tiny.yaml`, and another layout of its work."""

from tests.support.runs import REWARD_MODEL

# the same work cut up in another way
OTHER_LAYOUT = (
    *("layout.rollout_slots=2", "layout.prefill_chunk=2", "layout.forward_micro_batch=2"),
    *("layout.update_micro_batch=1", "layout.padding=left", "layout.prefix_cache=false"),
)
UNPADDED_LAYOUT = (
    *("layout.rollout_slots=4", "layout.prefix_cache=false", "layout.prefill_chunk=2", "layout.padding=none"),
    *("layout.forward_micro_batch=4", "layout.update_micro_batch=1", "layout.gradient_checkpointing=true"),
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
    "high": ("numerics.precision=high", "value={learning_rate: 1e-3}", "kl={placement: loss, estimator: exact}"),
    "head": (
        *("value={kind: head, value_coef: 0.5}", "kl={placement: loss, estimator: exact}"),
        *("ppo.objective={kind: kl_penalty}", "ppo.aggregation=sequence_sum", "ppo.warmup_iterations=1"),
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
