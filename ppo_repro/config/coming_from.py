"""Translate the fields of TRL, verl and OpenRLHF in one table, for readers and for suggestions after mistakes.

verl's names are shortened: `actor.optim.lr` means `actor_rollout_ref.actor.optim.lr`.

Sources, read in November 2026: GRPOConfig, DPOConfig, ModelConfig and the experimental PPOConfig of huggingface/trl;
TrainingArguments of transformers; _generated_ppo_trainer.yaml and rollout_correction.yaml in verl/trainer/config of
volcengine/verl; openrlhf/cli/train_ppo_ray.py of OpenRLHF/OpenRLHF.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Row:
    """A field of this package, and the names of the same field in other frameworks."""

    ours: str  # as after --set
    _: KW_ONLY
    trl: str = ""  # names with a space between them
    verl: str = ""  # the end of the dotted name
    openrlhf: str = ""
    remark: str = ""  # on the meaning of the field here, which a suggestion tells
    also: str = ""  # what people write besides, in nobody's configuration

    @property
    def names(self) -> list[str]:
        """Return all names of this field in other frameworks."""
        return " ".join((self.trl, self.verl, self.openrlhf, self.also)).split()


ROWS = (
    Row("experiment", trl="run_name exp_name", verl="trainer.experiment_name", openrlhf="wandb_run_name", also="name"),
    Row("model.path", trl="model_name_or_path sft_model_path", verl="model.path", openrlhf="pretrain", remark="a folder, with `kind: folder`", also="model.name model_name model_path name_or_path"),
    Row("task.path", trl="train_dataset dataset_name", verl="data.train_files", openrlhf="prompt_data", remark="JSON Lines", also="dataset"),
    Row("task.eval_path", trl="eval_dataset", verl="data.val_files", openrlhf="eval_dataset", remark="`task.num_eval_prompts` of its prompts, or of task.path's"),
    Row("task.prompt_template", verl="data.prompt_key", remark="a text with {NAME} for a field"),
    Row("task.chat_template", openrlhf="apply_chat_template"),
    Row("rollout.prompts_per_iteration", trl="generation_batch_size", verl="data.train_batch_size", openrlhf="rollout_batch_size", remark="counts prompts, not responses", also="batch_size"),
    Row("rollout.samples_per_prompt", trl="num_generations", verl="rollout.n", openrlhf="n_samples_per_prompt"),
    Row("rollout.max_response_tokens", trl="max_completion_length response_length", verl="data.max_response_length", openrlhf="generate_max_len", also="max_new_tokens max_tokens"),
    Row("numerics.max_context", trl="max_length vllm_max_model_length", verl="data.max_prompt_length rollout.max_model_len", openrlhf="prompt_max_len max_len", remark="prompt plus response", also="max_prompt_length"),
    Row("rollout.engine.kind", trl="use_vllm vllm_mode", verl="rollout.name", openrlhf="vllm_num_engines"),
    Row("reward.terms", trl="reward_funcs reward_model_path", verl="custom_reward_function.path reward_model.path", openrlhf="remote_rm_url reward_pretrain", remark="kinds `function`, `trl`, `verl`, `model`", also="reward_function reward_model"),
    Row("reward.terms.weight", trl="reward_weights"),
    Row("reward.whiten", trl="whiten_rewards"),
    Row("kl.kl_coef", trl="beta kl_coef", verl="kl_ctrl.kl_coef kl_loss_coef", openrlhf="init_kl_coef", also="coef"),
    Row("kl.placement", verl="use_kl_in_reward use_kl_loss", openrlhf="use_kl_loss", remark="`reward`, `loss` or `none`"),
    Row("kl.estimator", trl="kl_estimator", verl="kl_penalty kl_loss_type", openrlhf="kl_estimator", remark="verl's `low_var_kl` is `k3`"),
    Row("kl.controller.kind", trl="adap_kl_ctrl", verl="kl_ctrl.type"),
    Row("kl.controller.target_kl", trl="target", verl="kl_ctrl.target_kl", openrlhf="kl_target"),
    Row("kl.controller.horizon", trl="horizon", verl="kl_ctrl.horizon", openrlhf="kl_horizon"),
    Row("advantages.kind", verl="adv_estimator", openrlhf="advantage_estimator", remark="GRPO is `group`", also="estimator"),
    Row("advantages.gae_lambda", trl="lam", verl="lam", openrlhf="lambd", also="lambda"),
    Row("advantages.scale", trl="scale_rewards", verl="norm_adv_by_std_in_grpo", openrlhf="no_advantage_std_norm", remark="`kind: group`; true divides by the standard deviation"),
    Row("value.learning_rate", verl="critic.optim.lr", openrlhf="critic_learning_rate", also="lr critic.lr critic_lr"),
    Row("value.clip_range", trl="cliprange_value", verl="critic.cliprange_value", openrlhf="value_clip"),
    Row("value.value_coef", trl="vf_coef", remark="`kind: head`"),
    Row("ppo.iterations", trl="max_steps total_episodes", verl="trainer.total_training_steps total_epochs", openrlhf="num_episodes", remark="counts rollouts, not optimizer steps (TRL's `max_steps`), episodes or passes over prompts", also="steps num_steps"),
    Row("ppo.epochs", trl="num_iterations num_ppo_epochs", verl="ppo_epochs", openrlhf="max_epochs", also="update_epochs"),
    Row("ppo.minibatch_size", trl="mini_batch_size", verl="ppo_mini_batch_size", openrlhf="train_batch_size", remark="counts responses, not prompts", also="minibatch batch_size"),
    Row("ppo.learning_rate", trl="learning_rate", verl="actor.optim.lr", openrlhf="actor_learning_rate", also="lr"),
    Row("ppo.objective.kind", trl="loss_type importance_sampling_level", verl="policy_loss.loss_mode", openrlhf="policy_loss_type"),
    Row("ppo.objective.clip_range", trl="epsilon cliprange", verl="clip_ratio clip_ratio_low", openrlhf="eps_clip", also="clip clip_low eps"),
    Row("ppo.objective.clip_range_high", trl="epsilon_high", verl="clip_ratio_high", openrlhf="eps_clip_low_high", also="clip_high"),
    Row("ppo.objective.dual_clip", trl="delta", verl="clip_ratio_c", openrlhf="dual_clip"),
    Row("ppo.aggregation", trl="loss_type", verl="loss_agg_mode", remark="`dapo` and `token-mean` are `token_mean`"),
    Row("ppo.importance_weights", trl="vllm_importance_sampling_correction vllm_importance_sampling_mode", verl="rollout_correction.rollout_is", openrlhf="enable_vllm_is_correction"),
    Row("ppo.importance_weights.cap", trl="vllm_importance_sampling_cap", verl="rollout_is_threshold", openrlhf="vllm_is_truncated_threshold"),
    Row("ppo.rejection", verl="rollout_correction.rollout_rs", remark="a list of rules; bounds are of w, verl's of 1 / w"),
    Row("ppo.ratio_anchor", verl="rollout_correction.bypass_mode", remark="true is `rollout`, false is `old`"),
    Row("ppo.entropy_coef", verl="entropy_coeff", openrlhf="entropy_loss_coef", also="ent_coef"),
    Row("ppo.schedule", trl="lr_scheduler_type", verl="optim.warmup_style", openrlhf="lr_scheduler", also="lr_schedule scheduler"),
    Row("ppo.warmup_iterations", trl="warmup_steps warmup_ratio", verl="optim.lr_warmup_steps lr_warmup_steps_ratio", openrlhf="lr_warmup_ratio"),
    Row("ppo.adam_beta2", openrlhf="adam_betas", remark="beta1 is 0.9"),
    Row("ppo.adam_eps", trl="adam_epsilon"),
    Row("ppo.weight_decay", openrlhf="l2"),
    Row("ppo.max_grad_norm", verl="grad_clip", openrlhf="max_norm"),
    Row("lora.rank", trl="lora_r", verl="lora_rank", openrlhf="lora_rank"),
    Row("lora.alpha", trl="lora_alpha", verl="lora_alpha", openrlhf="lora_alpha"),
    Row("lora.target_modules", trl="lora_target_modules"),
    Row("evaluation.every", trl="eval_steps", verl="trainer.test_freq", openrlhf="eval_steps"),
    Row("checkpoints.every", trl="save_steps", verl="trainer.save_freq", openrlhf="save_steps"),
    Row("checkpoints.keep", trl="save_total_limit", verl="trainer.max_actor_ckpt_to_keep", openrlhf="max_ckpt_num"),
    Row("layout.update_micro_batch", trl="per_device_train_batch_size", verl="ppo_micro_batch_size_per_gpu", openrlhf="micro_train_batch_size", remark="changes no result", also="ppo_micro_batch_size"),
    Row("layout.forward_micro_batch", trl="local_rollout_forward_batch_size", verl="log_prob_micro_batch_size_per_gpu", openrlhf="micro_rollout_batch_size", remark="changes no result"),
    Row("layout.gradient_checkpointing", verl="enable_gradient_checkpointing"),
    Row("ppo.clip_range", also="clip clip_coef eps_clip epsilon cliprange"),
    Row("ppo.value_coef", also="vf_coef"),
    Row("ppo.gae_lambda", also="lam lambda"),
    Row("environment.id", also="env env_id env_name"),
    Row("environment.num_envs", also="n_envs"),
    Row("environment.steps_per_env", also="n_steps num_steps"),
    Row("dpo.beta", trl="beta", remark="in files for DPO", also="beta"),
    Row("dpo.learning_rate", trl="learning_rate", also="lr"),
    Row("dpo.epochs", trl="num_train_epochs"),
    Row("dpo.minibatch_size", trl="per_device_train_batch_size", remark="counts pairs", also="batch_size"),
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


def meant(path: str, known: Collection[str]) -> list[Row]:
    """Return the rows of `known` fields with the same meaning as a dotted path of another framework.

    The longest names that end the path count; if there are none, names that end with the path.
    """
    written, candidates = path.lower().replace("-", "_").split("."), list[tuple[int, Row]]()
    for row in ROWS:
        for parts in (name.split(".") for name in row.names if row.ours in known):
            if written[-len(parts) :] == parts:
                candidates.append((len(parts), row))
            elif parts[-len(written) :] == written:
                candidates.append((0, row))
    longest = max((length for length, _ in candidates), default=0)
    return [row for length, row in candidates if length == longest]


def reason(path: str) -> str | None:
    """Return why there is deliberately no field of this name; None if there is no such reason."""
    return NO_FIELD.get(path.rpartition(".")[2].lower().replace("-", "_"))
