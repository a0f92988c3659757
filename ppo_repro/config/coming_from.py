"""Translate the fields of TRL, verl and OpenRLHF in one table, for readers and for suggestions after mistakes.

verl's names are shortened: `actor.optim.lr` means `actor_rollout_ref.actor.optim.lr`.

Sources, read in November 2026: GRPOConfig, DPOConfig, ModelConfig and the experimental PPOConfig of huggingface/trl;
TrainingArguments of transformers; _generated_ppo_trainer.yaml and rollout_correction.yaml in verl/trainer/config of
volcengine/verl; openrlhf/cli/train_ppo_ray.py of OpenRLHF/OpenRLHF.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A field of this package, and the names of the same field in other frameworks."""

    ours: str  # as after --set
    trl: str = ""  # names with a space between them
    verl: str = ""  # the end of the dotted name
    openrlhf: str = ""
    differs: str = ""  # difference in meaning
    also: str = ""  # what people write besides, in nobody's configuration

    @property
    def names(self) -> list[str]:
        """Return all names of this field in other frameworks."""
        return " ".join((self.trl, self.verl, self.openrlhf, self.also)).split()


ROWS = (
    # here, TRL, verl, OpenRLHF, what differs, also
    Row("experiment", "run_name exp_name", "trainer.experiment_name", "wandb_run_name", "", "name"),
    Row("model.path", "model_name_or_path sft_model_path", "model.path", "pretrain", "a folder, with `kind: folder`", "model.name model_name model_path name_or_path"),
    Row("task.path", "train_dataset dataset_name", "data.train_files", "prompt_data", "JSON Lines", "dataset"),
    Row("task.eval_path", "eval_dataset", "data.val_files", "eval_dataset", "`task.num_eval_prompts` of its prompts, or of task.path's"),
    Row("task.prompt_template", "", "data.prompt_key", "", "a text with {NAME} for a field"),
    Row("task.chat_template", "", "", "apply_chat_template"),
    Row("rollout.prompts_per_iteration", "generation_batch_size", "data.train_batch_size", "rollout_batch_size", "TRL counts responses", "batch_size"),
    Row("rollout.samples_per_prompt", "num_generations", "rollout.n", "n_samples_per_prompt"),
    Row("rollout.max_response_tokens", "max_completion_length response_length", "data.max_response_length", "generate_max_len", "", "max_new_tokens max_tokens"),
    Row("numerics.max_context", "max_length vllm_max_model_length", "data.max_prompt_length rollout.max_model_len", "prompt_max_len max_len", "prompt plus response", "max_prompt_length"),
    Row("rollout.engine.kind", "use_vllm vllm_mode", "rollout.name", "vllm_num_engines"),
    Row("reward.terms", "reward_funcs reward_model_path", "custom_reward_function.path reward_model.path", "remote_rm_url reward_pretrain", "kinds `function`, `trl`, `verl`, `model`", "reward_function reward_model"),
    Row("reward.terms.weight", "reward_weights"),
    Row("reward.whiten", "whiten_rewards"),
    Row("kl.kl_coef", "beta kl_coef", "kl_ctrl.kl_coef kl_loss_coef", "init_kl_coef", "", "coef"),
    Row("kl.placement", "", "use_kl_in_reward use_kl_loss", "use_kl_loss", "TRL's GRPO: `loss`"),
    Row("kl.estimator", "kl_estimator", "kl_penalty kl_loss_type", "kl_estimator", "verl's `low_var_kl` is `k3`"),
    Row("kl.controller.kind", "adap_kl_ctrl", "kl_ctrl.type"),
    Row("kl.controller.target_kl", "target", "kl_ctrl.target_kl", "kl_target"),
    Row("kl.controller.horizon", "horizon", "kl_ctrl.horizon", "kl_horizon"),
    Row("advantages.kind", "", "adv_estimator", "advantage_estimator", "GRPO is `group`", "estimator"),
    Row("advantages.gae_lambda", "lam", "lam", "lambd", "", "lambda"),
    Row("advantages.scale", "scale_rewards", "norm_adv_by_std_in_grpo", "no_advantage_std_norm", "`kind: group`; OpenRLHF's means the opposite"),
    Row("value.learning_rate", "", "critic.optim.lr", "critic_learning_rate", "", "lr critic.lr critic_lr"),
    Row("value.clip_range", "cliprange_value", "critic.cliprange_value", "value_clip"),
    Row("value.value_coef", "vf_coef", "", "", "`kind: head`"),
    Row("ppo.iterations", "max_steps total_episodes", "trainer.total_training_steps total_epochs", "num_episodes", "counts rollouts, not optimizer steps (TRL's `max_steps`), episodes or passes over prompts", "steps num_steps"),
    Row("ppo.epochs", "num_iterations num_ppo_epochs", "ppo_epochs", "max_epochs", "", "update_epochs"),
    Row("ppo.minibatch_size", "mini_batch_size", "ppo_mini_batch_size", "train_batch_size", "responses; verl counts prompts", "minibatch batch_size"),
    Row("ppo.learning_rate", "learning_rate", "actor.optim.lr", "actor_learning_rate", "", "lr"),
    Row("ppo.objective.kind", "loss_type importance_sampling_level", "policy_loss.loss_mode", "policy_loss_type"),
    Row("ppo.objective.clip_range", "epsilon cliprange", "clip_ratio clip_ratio_low", "eps_clip", "", "clip clip_low eps"),
    Row("ppo.objective.clip_range_high", "epsilon_high", "clip_ratio_high", "eps_clip_low_high", "", "clip_high"),
    Row("ppo.objective.dual_clip", "delta", "clip_ratio_c", "dual_clip"),
    Row("ppo.aggregation", "loss_type", "loss_agg_mode", "", "`dapo` and `token-mean` are `token_mean`"),
    Row("ppo.importance_weights", "vllm_importance_sampling_correction vllm_importance_sampling_mode", "rollout_correction.rollout_is", "enable_vllm_is_correction"),
    Row("ppo.importance_weights.cap", "vllm_importance_sampling_cap", "rollout_is_threshold", "vllm_is_truncated_threshold"),
    Row("ppo.rejection", "", "rollout_correction.rollout_rs", "", "a list of rules; bounds are of w, verl's of 1 / w"),
    Row("ppo.ratio_anchor", "", "rollout_correction.bypass_mode", "", "true is `rollout`, false is `old`"),
    Row("ppo.entropy_coef", "", "entropy_coeff", "entropy_loss_coef", "", "ent_coef"),
    Row("ppo.schedule", "lr_scheduler_type", "optim.warmup_style", "lr_scheduler", "", "lr_schedule scheduler"),
    Row("ppo.warmup_iterations", "warmup_steps warmup_ratio", "optim.lr_warmup_steps lr_warmup_steps_ratio", "lr_warmup_ratio"),
    Row("ppo.adam_beta2", "", "", "adam_betas", "beta1 is 0.9"),
    Row("ppo.adam_eps", "adam_epsilon"),
    Row("ppo.weight_decay", "", "", "l2"),
    Row("ppo.max_grad_norm", "", "grad_clip", "max_norm"),
    Row("lora.rank", "lora_r", "lora_rank", "lora_rank"),
    Row("lora.alpha", "lora_alpha", "lora_alpha", "lora_alpha"),
    Row("lora.target_modules", "lora_target_modules"),
    Row("evaluation.every", "eval_steps", "trainer.test_freq", "eval_steps"),
    Row("checkpoints.every", "save_steps", "trainer.save_freq", "save_steps"),
    Row("checkpoints.keep", "save_total_limit", "trainer.max_actor_ckpt_to_keep", "max_ckpt_num"),
    Row("layout.update_micro_batch", "per_device_train_batch_size", "ppo_micro_batch_size_per_gpu", "micro_train_batch_size", "changes no result", "ppo_micro_batch_size"),
    Row("layout.forward_micro_batch", "local_rollout_forward_batch_size", "log_prob_micro_batch_size_per_gpu", "micro_rollout_batch_size", "changes no result"),
    Row("layout.gradient_checkpointing", "", "enable_gradient_checkpointing"),
    Row("ppo.clip_range", "", "", "", "", "clip clip_coef eps_clip epsilon cliprange"),
    Row("ppo.value_coef", "", "", "", "", "vf_coef"),
    Row("ppo.gae_lambda", "", "", "", "", "lam lambda"),
    Row("environment.id", "", "", "", "", "env env_id env_name"),
    Row("environment.num_envs", "", "", "", "", "n_envs"),
    Row("environment.steps_per_env", "", "", "", "", "n_steps num_steps"),
    Row("dpo.beta", "beta", "", "", "in files for DPO", "beta"),
    Row("dpo.learning_rate", "learning_rate", "", "", "", "lr"),
    Row("dpo.epochs", "num_train_epochs"),
    Row("dpo.minibatch_size", "per_device_train_batch_size", "", "", "pairs", "batch_size"),
)  # fmt: skip

FLOAT32 = "float32 only; mismatch.sampler.precision and mismatch.sampler.stock let the sampler round"
PROCESSES = "torchrun starts 1, 2, 4 or 8 processes, on one machine or several, and each has the whole model"
WHOLE = "a model is never cut into parts: each process has it whole"
TRACK = "give --track URI, --track wandb or --track FILE.py:FUNCTION to the command"
OUT = "give --out DIR to the command"
FULL = "samplers cut by top_k and top_p only, so that a token's log-prob has one meaning"
NO_FIELD = {  # names that belong to nothing here by intention, and why
    **dict.fromkeys(("dtype", "torch_dtype", "bf16", "fp16", "tf32", "model_dtype"), FLOAT32),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization"), FLOAT32),
    **dict.fromkeys(("nnodes", "n_gpus_per_node", "num_processes", "world_size", "num_gpus"), PROCESSES),
    **dict.fromkeys(("actor_num_nodes", "actor_num_gpus_per_node", "zero_stage", "deepspeed", "fsdp"), WHOLE),
    **dict.fromkeys(("fsdp_config", "tensor_model_parallel_size", "vllm_tensor_parallel_size"), WHOLE),
    **dict.fromkeys(("report_to", "logger", "log_with", "use_wandb", "use_tensorboard", "wandb_project"), TRACK),
    **dict.fromkeys(("output_dir", "default_local_dir", "save_path", "ckpt_path"), OUT),
    **dict.fromkeys(("min_p", "repetition_penalty"), FULL),
    **dict.fromkeys(("adam_beta1", "beta1"), "AdamW's beta1 is 0.9"),
    "gradient_accumulation_steps": "a minibatch is one step; layout.update_micro_batch cuts it without changing a bit",
    "trust_remote_code": "code from a model's folder is never executed",
    "attn_implementation": "deterministic numerics have one attention; numerics.mode = native takes transformers' own",
    "normalize_reward": "a reward model's scores are not scaled by a stored mean; reward.whiten takes an iteration's",
    "optimizer": "AdamW is the only one",
    "optim": "AdamW is the only one",
}


def meant(path: str, known: Collection[str]) -> list[str]:
    """Return the fields of `known` with the same meaning as a dotted path of another framework.

    The longest names that end the path count; if there are none, names that end with the path.
    """
    written, candidates = path.lower().replace("-", "_").split("."), list[tuple[int, str]]()
    for row in ROWS:
        for parts in (name.split(".") for name in row.names if row.ours in known):
            if written[-len(parts) :] == parts:
                candidates.append((len(parts), row.ours))
            elif parts[-len(written) :] == written:
                candidates.append((0, row.ours))
    longest = max((length for length, _ in candidates), default=0)
    return list(dict.fromkeys(ours for length, ours in candidates if length == longest))


def reason(path: str) -> str | None:
    """Return why there is deliberately no field of this name; None if there is no such reason."""
    return NO_FIELD.get(path.rpartition(".")[2].lower().replace("-", "_"))
