"""Configure the policy: a small model made here, or a folder of transformers."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.section import Count, Fraction, Index, Layers, PathText, Positive, Section, Width


class ExpertsConfig(Section):
    """A router and its experts in place of every MLP."""

    family: Literal["qwen3_moe", "mixtral", "olmoe"] = Field(description="Which transformers class the policy has.")
    count: Annotated[int, Field(ge=2, le=1024)] = Field(description="Experts in each layer, each of intermediate_size.")
    per_token: Count = Field(description="Experts that compute a token; at most count.")

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.per_token > self.count:
            raise ValueError(f"per_token = {self.per_token} must be at most count = {self.count}")
        return self


DenseFamily = Literal[
    "qwen3", "llama", "smollm3", "granite", "seed_oss", "phi3", "ministral", "gemma2", "gemma3_text", "olmo2", "olmo3"
]


class TinyModel(Section):
    """A small model made from scratch, with its own tokenizer and a supervised warm start on the task."""

    kind: Literal["tiny"] = Field(description="Make the policy here instead of loading one.")
    hidden_size: Width = Field(description="Width of the residual stream.")
    num_layers: Layers = Field(description="Number of decoder layers.")
    num_attention_heads: Width = Field(description="Number of query heads; divides hidden_size.")
    num_key_value_heads: Width = Field(description="Number of key/value heads; divides num_attention_heads.")
    intermediate_size: Width = Field(description="Width of the MLP, or of each expert.")
    family: DenseFamily = Field("qwen3", description="Family of a dense model, as model_type of transformers.")
    experts: ExpertsConfig | None = Field(None, description="Make a mixture of experts; null: a dense model.")
    tokenizer: Literal["bpe", "characters", "words"] = Field("bpe", description="Byte-level BPE, or one kind of token.")
    vocab_size: Width = Field(description="Largest number of tokens the tokenizer may have.")
    warm_start_steps: Index = Field(description="At most this many supervised steps before PPO; 0 for none.")
    warm_start_accuracy: Fraction = Field(1.0, description="Greedy training accuracy at which supervised steps end.")
    warm_start_batch_size: Count = Field(description="Training examples per supervised step.")
    warm_start_learning_rate: Positive = Field(description="AdamW learning rate of the supervised steps.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError("hidden_size must be an even multiple of num_attention_heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.experts is not None and self.family != "qwen3":
            raise ValueError("family is of a dense model; experts.family is of a mixture")
        return self


class ModelFolder(Section):
    """A transformers folder with its tokenizer, of a family that `models/README.md` lists."""

    kind: Literal["folder"] = Field(description="Load the policy from a local folder.")
    path: PathText = Field(description="Folder with config.json, safetensors and tokenizer files.")
