"""The whole configuration of a language run: frozen, strict, one sentence per field. `config.files` reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.algorithm import (
    AdvantagesConfig,
    ExpertsConfig,
    GaeAdvantages,
    KLConfig,
    KLInReward,
    LoraConfig,
    PPOConfig,
    SeparateValue,
    ValueConfig,
)
from ppo_repro.config.engine import RolloutConfig
from ppo_repro.config.layout import LayoutConfig, not_on_device
from ppo_repro.config.mismatch import MismatchConfig, contradictions, has_no_routes, not_possible
from ppo_repro.config.objectives import AdaptiveClipObjective, PenaltyObjective
from ppo_repro.config.records import CheckpointConfig, RecordsConfig
from ppo_repro.config.reward import RewardConfig, TrainedRewardModel
from ppo_repro.config.section import (
    Count,
    Experiment,
    Fraction,
    Index,
    Layers,
    PathText,
    Positive,
    Section,
    Width,
    with_usual,
)
from ppo_repro.config.tasks import ArithmeticTask, TaskConfig, misjudged, with_usual_terms

# what a group of fields is when it does not say: (group, field, value)
USUAL = (("kl", "placement", "reward"), ("advantages", "kind", "gae"), ("value", "kind", "separate"))

USUAL_ACCURACY_SEQUENCES = 4  # in native numerics, which measure nothing, this says nothing


class TinyModel(Section):
    """A small Qwen3 made from nothing, with its own tokenizer, warm-started on the task by supervision."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"experts"})

    kind: Literal["tiny"] = Field(description="Make the policy here instead of loading one.")
    hidden_size: Width = Field(description="Width of the residual stream.")
    num_layers: Layers = Field(description="Number of decoder layers.")
    num_attention_heads: Width = Field(description="Number of query heads; divides hidden_size.")
    num_key_value_heads: Width = Field(description="Number of key/value heads; divides num_attention_heads.")
    intermediate_size: Width = Field(description="Width of the MLP, or of each expert.")
    experts: ExpertsConfig | None = Field(
        None, description="Make a mixture of experts instead of a dense Qwen3; null: do not."
    )
    tokenizer: Literal["bpe", "bpe_single_digits", "bpe_three_digits", "characters", "words"] = Field(
        "bpe", description="BPE, digits merged like letters, single or in groups of three; characters; whole words."
    )
    vocab_size: Width = Field(description="Largest number of tokens the tokenizer may have.")
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
    """A transformers folder with its tokenizer, of a family that `models/README.md` lists."""

    kind: Literal["folder"] = Field(description="Load the policy from a local folder.")
    path: PathText = Field(description="Folder with config.json, safetensors and tokenizer files.")


class EvaluationConfig(Section):
    """Greedy decoding of the held-out prompts."""

    every: Count = Field(5, description="Evaluate before every n-th iteration; before and after always.")


class NumericsConfig(Section):
    """How numbers are computed."""

    mode: Literal["deterministic", "native"] = Field(
        "deterministic",
        description="`deterministic`: one written order for every sum, so layout cannot matter; `native`: stock torch.",
    )
    max_context: Annotated[int, Field(ge=2, le=32768)] = Field(
        description="Longest prompt plus response, tokens; more are refused, and it changes no number."
    )


class RunNumericsConfig(NumericsConfig):
    """How numbers are computed, and whether a run measures how accurate they are."""

    accuracy_sequences: Index = Field(
        USUAL_ACCURACY_SEQUENCES,
        description="At its start an exact run compares the log-probs of this many sequences with float64; 0 for none.",
    )


class RunConfig(Experiment):
    """One run."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"mismatch"})

    model: TinyModel | ModelFolder = Field(discriminator="kind")
    task: TaskConfig = Field(discriminator="kind")
    rollout: RolloutConfig
    reward: RewardConfig = RewardConfig()
    kl: KLConfig = KLInReward()
    advantages: AdvantagesConfig = GaeAdvantages()
    value: ValueConfig
    ppo: PPOConfig
    lora: LoraConfig | None = Field(
        None, description="Train low-rank adapters instead of all weights; null: all weights."
    )
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
    def bound(self) -> str:
        """The setting by which bits belong to a kind of machine; empty where they belong to none."""
        return "numerics.mode = native" if self.numerics.mode == "native" else self.mismatch.bound

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
        wrong = [
            line for check in (_sizes, _numerics, _algorithm, _value, _template, _task, _faults) for line in check(self)
        ]
        if wrong:
            raise ValueError("\n".join(wrong))
        return self


def _sizes(config: RunConfig) -> Iterator[str]:
    if config.sequences_per_iteration % config.ppo.minibatch_size:
        yield (
            f"ppo.minibatch_size = {config.ppo.minibatch_size} must divide the "
            f"{config.sequences_per_iteration} sequences of an iteration "
            "(rollout.prompts_per_iteration x rollout.samples_per_prompt)"
        )
    ppo = config.ppo
    if ppo.warmup_iterations >= ppo.iterations:
        yield f"ppo.warmup_iterations = {ppo.warmup_iterations} must be smaller than ppo.iterations = {ppo.iterations}"


def _numerics(config: RunConfig) -> Iterator[str]:
    native = config.numerics.mode == "native"
    yield from not_on_device(config.layout, config.numerics.mode)
    if native and config.numerics.accuracy_sequences not in (0, USUAL_ACCURACY_SEQUENCES):
        yield "numerics.accuracy_sequences needs numerics.mode = deterministic; native numerics measure nothing"
    engine = config.rollout.engine
    if native and engine.kind == "sglang" and engine.numerics == "deterministic":
        yield "rollout.engine.numerics = deterministic needs numerics.mode = deterministic; stock goes with both"
    yield from not_possible(config.mismatch, config.numerics.mode, engine.kind)
    dense = isinstance(config.model, TinyModel) and config.model.experts is None
    if config.ppo.replay_routes:
        yield from has_no_routes(config.mismatch, config.numerics.mode, dense)
    if config.rollout.max_response_tokens >= config.numerics.max_context:
        yield (
            f"rollout.max_response_tokens = {config.rollout.max_response_tokens} must be smaller than "
            f"numerics.max_context = {config.numerics.max_context}"
        )


def _algorithm(config: RunConfig) -> Iterator[str]:
    ppo = config.ppo
    if ppo.importance_weights is not None and ppo.ratio_anchor != "old":
        yield "ppo.importance_weights needs ppo.ratio_anchor = old: with rollout the ratio corrects already"
    adaptive = isinstance(ppo.objective, AdaptiveClipObjective) or (
        isinstance(ppo.objective, PenaltyObjective) and ppo.objective.target_kl is not None
    )
    if ppo.epochs == 1 and ppo.minibatch_size == config.sequences_per_iteration:
        for name, is_set in (("objective.target_kl", adaptive), ("early_stop_kl", ppo.early_stop_kl is not None)):
            if is_set:
                yield f"ppo.{name} needs more than one optimizer step per iteration to see a KL"
    kl = config.kl
    if isinstance(kl, KLInReward) and kl.controller.kind == "adaptive" and not kl.kl_coef:
        yield "kl.controller.kind = adaptive needs a kl.kl_coef above 0: it multiplies it"
    if config.advantages.kind == "group" and config.rollout.samples_per_prompt == 1:
        yield "advantages.kind = group needs rollout.samples_per_prompt of at least 2"


def _task(config: RunConfig) -> Iterator[str]:
    yield from misjudged(config.task, config.reward)
    if config.task.turns > 1 and config.rollout.engine.kind == "sglang":
        yield "task.max_turns greater than 1 needs rollout.engine.kind = torch: SGLang samples one turn"
    if config.rollout.stop and config.rollout.engine.kind == "sglang":
        yield "rollout.stop needs rollout.engine.kind = torch: SGLang's servers here have no tokenizer"


def _value(config: RunConfig) -> Iterator[str]:
    if (config.advantages.kind == "gae") == (config.value.kind == "none"):
        yield "advantages.kind = gae needs a value model, and group has no use for one: value.kind = none"
    if config.value.kind == "head" and config.lora is not None:
        yield "value.kind = head needs the whole trunk to be trained; remove lora or take kind separate"
    if isinstance(config.value, SeparateValue) and config.value.init == "reward_model" and config.reward.model is None:
        yield "value.init = reward_model needs a term of kind model or trained_model in reward.terms"
    trained = isinstance(config.reward.model, TrainedRewardModel)
    if trained and not isinstance(config.task, ArithmeticTask):
        yield "reward.terms of kind trained_model need task.kind = arithmetic, whose wrong answers are known"
    if config.advantages.kind == "group":
        idle = [
            name
            for name, default in (("placement", "last"), ("whiten", "none"))
            if getattr(config.reward, name) != default
        ]
        if idle or isinstance(config.kl, KLInReward):
            field = f"reward.{idle[0]}" if idle else "kl.placement = reward"
            yield f"{field} acts on per-token rewards, which advantages.kind = group does not use"


def _template(config: RunConfig) -> Iterator[str]:
    if isinstance(config.model, TinyModel) and config.task.chat_template:
        yield "task.chat_template needs model.kind = folder: the tiny tokenizer has no template"


def _faults(config: RunConfig) -> Iterator[str]:
    sampler, trainer, turns = config.mismatch.sampler, config.mismatch.trainer, config.task.turns
    yield from contradictions(sampler, trainer, config.rollout, turns, config.ppo.iterations)
