"""The whole configuration of a run: frozen, strict, one sentence per field.

Canonical JSON and its digest go out; `config_yaml` reads it from a file. Nothing changes a config after it is made.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A frozen group of fields; an unknown field or a value of another type is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TinyModel(Section):
    """A small Qwen3 made from nothing, with its own BPE tokenizer, warm-started on the task by supervision."""

    kind: Literal["tiny"] = Field(description="Make the policy here instead of loading one.")
    hidden_size: Count = Field(description="Width of the residual stream.")
    num_layers: Count = Field(description="Number of decoder layers.")
    num_attention_heads: Count = Field(description="Number of query heads; divides hidden_size.")
    num_key_value_heads: Count = Field(description="Number of key/value heads; divides num_attention_heads.")
    intermediate_size: Count = Field(description="Width of the MLP.")
    vocab_size: Count = Field(description="Largest number of tokens the BPE tokenizer may have.")
    warm_start_steps: Index = Field(description="At most this many supervised steps before PPO; 0 for none.")
    warm_start_accuracy: Fraction = Field(
        1.0, description="Greedy accuracy on training prompts at which the supervised steps end."
    )
    warm_start_batch_size: Count = Field(description="Training examples per supervised step.")
    warm_start_learning_rate: Positive = Field(description="AdamW learning rate of the supervised steps.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError("hidden_size must be an even multiple of num_attention_heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self


class ModelFolder(Section):
    """A transformers folder with its tokenizer: Llama, Qwen2, Qwen3, Mistral, Gemma, GPT-2 or GPT-NeoX (Pythia)."""

    kind: Literal["folder"] = Field(description="Load the policy from a local folder.")
    path: str = Field(min_length=1, description="Folder with config.json, safetensors and tokenizer files.")


class ArithmeticTask(Section):
    """Additions such as `47+38=`; the answer is verifiable and its length in tokens varies."""

    kind: Literal["arithmetic"] = Field(description="Generate the prompts here.")
    max_operand: Count = Field(description="Operands are drawn from 0 to this number, both included.")
    num_eval_prompts: Count = Field(description="Prompts held out of training and used for evaluation.")
    reward: str = Field(
        "exact_match", description="`exact_match`, or `FILE.py:FUNCTION` called with prompt, response, answer."
    )


class JsonlTask(Section):
    """One JSON object per line with `prompt`, `answer` and optionally `key`."""

    kind: Literal["jsonl"] = Field(description="Read the prompts from a file.")
    path: str = Field(min_length=1, description="The JSON Lines file.")
    num_eval_prompts: Count = Field(description="Prompts held out of training and used for evaluation.")
    reward: str = Field(
        "exact_match", description="`exact_match`, or `FILE.py:FUNCTION` called with prompt, response, answer."
    )
    chat_template: bool = Field(
        False, description="Render each prompt as a user turn with the tokenizer's chat template."
    )


class RolloutConfig(Section):
    """What is sampled in one iteration, and from which distribution."""

    prompts_per_iteration: Count = Field(description="Distinct prompts per iteration.")
    samples_per_prompt: Count = Field(description="Responses sampled for each prompt.")
    max_response_tokens: Count = Field(description="A response without an end token stops here.")
    temperature: Positive = Field(1.0, description="Logits are divided by this, in sampling and in scoring.")
    top_k: Index = Field(0, description="Keep only the k likeliest tokens; 0 keeps all.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Keep the likeliest tokens up to this mass; 1 keeps all."
    )


class PPOConfig(Section):
    """The PPO update."""

    iterations: Count = Field(description="Rollout-update cycles.")
    epochs: Count = Field(description="Passes over each rollout.")
    minibatch_size: Count = Field(description="Sequences per optimizer step; divides the rollout.")
    ratio_anchor: Literal["rollout", "old"] = Field(
        "rollout", description="Denominator of the ratio: the sampler's log-probs or the recomputed ones."
    )
    clip_range: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="Clip range epsilon of the policy ratio.")
    value_clip_range: Positive = Field(0.2, description="Clip range of the value around its old prediction.")
    entropy_coef: NonNegative = Field(0.0, description="Weight of the entropy bonus, nats.")
    kl_coef: NonNegative = Field(0.05, description="Weight of the per-token KL penalty in the reward.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k1", description="Estimator of KL(policy || reference) from the sampled token."
    )
    gamma: Fraction = Field(1.0, description="Discount per token.")
    gae_lambda: Fraction = Field(0.95, description="GAE trace decay.")
    whiten_advantages: bool = Field(True, description="Shift and scale advantages to mean 0, variance 1.")
    learning_rate: NonNegative = Field(description="AdamW learning rate of the policy.")
    value_learning_rate: NonNegative = Field(description="AdamW learning rate of the value model.")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW first-moment decay.")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="AdamW second-moment decay.")
    adam_eps: Positive = Field(1e-8, description="AdamW denominator offset.")
    weight_decay: NonNegative = Field(0.0, description="AdamW decoupled weight decay.")
    max_grad_norm: Positive = Field(1.0, description="Gradients are scaled down to this global norm.")


class EvaluationConfig(Section):
    """Greedy decoding of the held-out prompts."""

    every: Count = Field(5, description="Evaluate before every n-th iteration; before and after always.")


class NumericsConfig(Section):
    """How numbers are computed."""

    mode: Literal["exact", "native"] = Field(
        "exact", description="`exact`: every sum exact, so layout cannot matter; `native`: stock torch."
    )
    operand_bits: Literal[14, 20] = Field(
        20, description="Number grids of the linear layers: 20 bits, 1e-6 relative; 14 bits, 1e-4, and faster on AMX."
    )
    max_context: Annotated[int, Field(ge=2, le=32768)] = Field(
        description="Longest prompt plus response, tokens; fixes the number grids of the run."
    )


class LayoutConfig(Section):
    """How the work is cut up. In exact numerics nothing here can change a result."""

    rollout_slots: Count = Field(64, description="Sequences decoded side by side, in each process.")
    prefix_cache: bool = Field(True, description="Prompts take over the keys and values of a prefix they share.")
    prefill_chunk: Index = Field(0, description="Prompt tokens per prefill pass; 0 takes prompts whole.")
    forward_micro_batch: Index = Field(0, description="Sequences per scoring pass; 0 takes all.")
    update_micro_batch: Index = Field(0, description="Sequences per backward pass; 0 takes the minibatch.")
    padding: Literal["right", "left", "none"] = Field(
        "right", description="Where short rows are padded; `none` packs sequences into one row."
    )
    threads: Count = Field(1, description="CPU threads, in each process.")
    backend: Literal["auto", "eager", "dgemm", "amx"] = Field(
        "auto", description="What computes exact numerics on a CPU: kernels on float64 or AMX, or eager torch."
    )
    gradient_checkpointing: bool = Field(
        False, description="Keep no activations inside decoder layers; compute them again in the backward pass."
    )
    rank_shares: Annotated[tuple[Index, ...], Field(strict=False)] = Field(
        (), description="In what proportion the processes of a run get sequences, one entry each; [] for equal shares."
    )

    @field_validator("rank_shares")
    @classmethod
    def _someone_works(cls, shares: tuple[int, ...]) -> tuple[int, ...]:
        if shares and not any(shares):
            raise ValueError("at least one must be greater than 0")
        return shares


class CheckpointConfig(Section):
    """Where an ended run can be resumed. Changes no result."""

    every: Index = Field(0, description="Write a checkpoint after every n-th iteration; 0 for none.")
    keep: Count = Field(2, description="Newest checkpoints kept; older ones are removed.")


class RunConfig(Section):
    """One run."""

    experiment: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(
        description="Name of the experiment; the folder its runs share."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(description="Every random stream is derived from this.")
    model: TinyModel | ModelFolder = Field(discriminator="kind")
    task: ArithmeticTask | JsonlTask = Field(discriminator="kind")
    rollout: RolloutConfig
    ppo: PPOConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    numerics: NumericsConfig
    layout: LayoutConfig = LayoutConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()

    @property
    def sequences_per_iteration(self) -> int:
        return self.rollout.prompts_per_iteration * self.rollout.samples_per_prompt

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.sequences_per_iteration % self.ppo.minibatch_size:
            raise ValueError(
                f"ppo.minibatch_size = {self.ppo.minibatch_size} must divide the "
                f"{self.sequences_per_iteration} sequences of an iteration "
                "(rollout.prompts_per_iteration x rollout.samples_per_prompt)"
            )
        native = self.numerics.mode == "native"
        if native and (self.numerics.operand_bits != 20 or self.layout.backend != "auto"):
            raise ValueError("numerics.operand_bits and layout.backend need numerics.mode = exact")
        if self.rollout.max_response_tokens >= self.numerics.max_context:
            raise ValueError(
                f"rollout.max_response_tokens = {self.rollout.max_response_tokens} must be smaller than "
                f"numerics.max_context = {self.numerics.max_context}"
            )
        if isinstance(self.model, TinyModel) and isinstance(self.task, JsonlTask) and self.task.chat_template:
            raise ValueError("task.chat_template needs model.kind = folder: the tiny tokenizer has no template")
        return self

    def canonical_json(self) -> str:
        """Sorted, compact JSON: equal configurations give equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()[:12]
