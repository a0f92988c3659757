"""The whole configuration of a language run: frozen, strict, one sentence per field. `config.files` reads it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.algorithm import (
    AdvantagesConfig,
    ExpertsConfig,
    GaeAdvantages,
    KLConfig,
    KLInReward,
    LoraConfig,
    PPOConfig,
    ValueConfig,
)
from ppo_repro.config.contradictions import contradictions
from ppo_repro.config.engine import RolloutConfig
from ppo_repro.config.layout import CheckpointConfig, LayoutConfig, RecordsConfig
from ppo_repro.config.mismatch import MismatchConfig
from ppo_repro.config.reward import RewardConfig
from ppo_repro.config.section import (
    Count,
    Experiment,
    Fraction,
    Index,
    Layers,
    NumericsMode,
    PathText,
    Positive,
    Section,
    Width,
    with_usual,
)
from ppo_repro.config.tasks import TaskConfig, with_usual_terms

# what a group of fields is when it does not say: (group, field, value)
USUAL = (("kl", "placement", "reward"), ("advantages", "kind", "gae"), ("value", "kind", "separate"))


class TinyModel(Section):
    """A small Qwen3 made from nothing, with its own tokenizer, warm-started on the task by supervision."""

    kind: Literal["tiny"] = Field(description="Make the policy here instead of loading one.")
    hidden_size: Width = Field(description="Width of the residual stream.")
    num_layers: Layers = Field(description="Number of decoder layers.")
    num_attention_heads: Width = Field(description="Number of query heads; divides hidden_size.")
    num_key_value_heads: Width = Field(description="Number of key/value heads; divides num_attention_heads.")
    intermediate_size: Width = Field(description="Width of the MLP, or of each expert.")
    experts: ExpertsConfig | None = Field(None, description="Make a mixture of experts; null: a dense Qwen3.")
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
        return self


class ModelFolder(Section):
    """A transformers folder with its tokenizer, of a family that `models/README.md` lists."""

    kind: Literal["folder"] = Field(description="Load the policy from a local folder.")
    path: PathText = Field(description="Folder with config.json, safetensors and tokenizer files.")


class EvaluationConfig(Section):
    """Greedy decoding of the held-out prompts."""

    every: Count = Field(5, description="Evaluate before every n-th iteration; before and after always.")


class NumericsConfig(NumericsMode):
    """How numbers are computed."""

    max_context: Annotated[int, Field(ge=2, le=32768)] = Field(
        description="Longest prompt plus response, tokens; more are refused, and it changes no number."
    )


class RunNumericsConfig(NumericsConfig):
    """How numbers are computed, and whether a run measures how accurate they are."""

    accuracy_sequences: Index = Field(
        4,
        description="At its start an exact run compares the log-probs of this many sequences with float64; 0 for none.",
    )


class RunConfig(Experiment):
    """One run."""

    model: TinyModel | ModelFolder = Field(discriminator="kind")
    task: TaskConfig = Field(discriminator="kind")
    rollout: RolloutConfig
    reward: RewardConfig = RewardConfig()
    kl: KLConfig = KLInReward()
    advantages: AdvantagesConfig = GaeAdvantages()
    value: ValueConfig
    ppo: PPOConfig
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters; null: all weights.")
    evaluation: EvaluationConfig = EvaluationConfig()
    numerics: RunNumericsConfig
    mismatch: MismatchConfig = MismatchConfig()
    layout: LayoutConfig = LayoutConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    records: RecordsConfig = RecordsConfig()

    @property
    def iterations(self) -> int:
        return self.ppo.iterations

    @property
    def sequences_per_iteration(self) -> int:
        return self.rollout.prompts_per_iteration * self.rollout.samples_per_prompt

    @property
    def is_native(self) -> bool:
        return self.numerics.mode == "native"

    @property
    def bound(self) -> str:
        """The setting by which bits belong to a kind of machine; empty where they belong to none."""
        return "numerics.mode = native" if self.is_native else self.mismatch.bound

    @property
    def asks_for_routes(self) -> bool:
        """Whether the sampler is to say which experts computed each token of a mixture."""
        return self.records.level == "deep" or self.ppo.replay_routes

    @model_validator(mode="before")
    @classmethod
    def _usual_variants(cls, tree: Any) -> Any:
        return with_usual_terms(with_usual(tree, USUAL))

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        wrong = contradictions(self)
        if wrong:
            raise ValueError("\n".join(wrong))
        return self
