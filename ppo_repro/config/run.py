"""Configure a language run, frozen and strict; `config.files` reads the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from ppo_repro.config.algorithm import (
    AdaptiveClipObjective,
    AdvantagesConfig,
    GaeAdvantages,
    KLConfig,
    KLInReward,
    LoraConfig,
    PenaltyObjective,
    PPOConfig,
    SeparateValue,
    ValueConfig,
)
from ppo_repro.config.layout import CheckpointConfig, LayoutConfig, RecordsConfig
from ppo_repro.config.mismatch import MismatchConfig
from ppo_repro.config.model import ModelFolder, TinyModel
from ppo_repro.config.numerics import RunNumericsConfig
from ppo_repro.config.rollout import RolloutConfig
from ppo_repro.config.section import (
    FIXED,
    CheckedFunction,
    Count,
    Experiment,
    Section,
    checked_functions,
)
from ppo_repro.config.tasks import (
    ColumnAdditionTask,
    FormatReward,
    PythonTask,
    ReasoningGymTask,
    RewardConfig,
    StepsReward,
    TaskConfig,
    TrainedRewardModel,
    Verifier,
    with_verifier_term,
)


class EvaluationConfig(Section):
    """Evaluation: greedy responses to the held-out prompts."""

    every: Count = Field(5, description="Evaluate before every n-th iteration; before and after always.")


class RunConfig(Experiment):
    """The configuration of one language run."""

    model: Annotated[TinyModel | ModelFolder, FIXED] = Field(discriminator="kind")
    task: TaskConfig = Field(discriminator="kind")
    rollout: RolloutConfig
    reward: RewardConfig = RewardConfig()
    kl: KLConfig = KLInReward()
    advantages: AdvantagesConfig = GaeAdvantages()
    value: ValueConfig
    ppo: PPOConfig
    lora: Annotated[LoraConfig | None, FIXED] = Field(None, description="Train low-rank adapters; null: all weights.")
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
    def machine_dependent_setting(self) -> str | None:
        """Return the setting that makes bits depend on the machine; None if no setting does."""
        return "numerics.mode = native" if self.is_native else self.mismatch.machine_dependent_setting

    @property
    def functions(self) -> dict[str, CheckedFunction]:
        """Return the user's functions that the loop calls, by field."""
        return dict(checked_functions(self))

    @property
    def asks_for_routes(self) -> bool:
        """Return whether the sampler must return the experts that computed each token of a mixture."""
        return self.records.level == "deep" or self.ppo.replay_routes

    @model_validator(mode="before")
    @classmethod
    def _fill_in_verifier(cls, tree: Any) -> Any:
        return with_verifier_term(tree)

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        wrong = [line for check in CHECKS for line in check(self)]
        if wrong:
            raise ValueError("\n".join(wrong))
        return self


def _update(config: RunConfig) -> Iterator[str]:
    ppo, sequences = config.ppo, config.sequences_per_iteration
    if sequences % ppo.minibatch_size:
        yield (
            f"ppo.minibatch_size = {ppo.minibatch_size} must divide the {sequences} sequences of an iteration "
            "(rollout.prompts_per_iteration x rollout.samples_per_prompt)"
        )
    tokens, context = config.rollout.max_response_tokens, config.numerics.max_context
    if tokens >= context:
        yield f"rollout.max_response_tokens = {tokens} must be smaller than numerics.max_context = {context}"
    adaptive = isinstance(ppo.objective, AdaptiveClipObjective | PenaltyObjective) and ppo.objective.target_kl
    if ppo.epochs == 1 and ppo.minibatch_size == sequences:
        for name, target in (("ppo.objective.target_kl", adaptive), ("ppo.early_stop_kl", ppo.early_stop_kl)):
            if target:
                yield f"{name} needs more than one step per iteration to see a KL"


def _engine(config: RunConfig) -> Iterator[str]:
    rollout, engine = config.rollout, config.rollout.engine
    of_plugin = engine.kind == "sglang" and engine.numerics == "deterministic"  # our kernels inside SGLang
    if of_plugin and config.is_native:
        yield "rollout.engine.numerics = deterministic needs numerics.mode = deterministic; stock goes with both"
    for field, value, whole in (("top_k", rollout.top_k, 0), ("top_p", rollout.top_p, 1)):
        if rollout.engine_without_promise is not None and value != whole:
            choice = "numerics = stock" if engine.kind == "sglang" else "kind = function"
            yield (
                f"rollout.engine.{choice} needs rollout.{field} = {whole}: which tokens the cut kept is not known, and "
                "the trainer's log-probs are those of the cut distribution"
            )
    if of_plugin and rollout.top_k == 1:
        yield "rollout.top_k must be 0 or above 1 with rollout.engine.kind = sglang, where 1 is greedy decoding"


def _sampler(config: RunConfig) -> Iterator[str]:
    sampler, native = config.mismatch.sampler, config.is_native
    if native and sampler.precision.rounds:
        yield "mismatch.sampler.precision needs numerics.mode = deterministic, whose numbers it rounds"
    if native and sampler.stock == "float32":
        yield ("mismatch.sampler.stock = float32 needs numerics.mode = deterministic; native numerics sample so anyway")
    if sampler.lag > 0 and config.ppo.iterations == 1:
        yield "mismatch.sampler.lag needs ppo.iterations of at least 2: the first one has no older weights"


def _built_in_sampler(config: RunConfig) -> Iterator[str]:
    """Yield a line for every setting that the built-in sampler has, and the configured engine has not."""
    if config.rollout.engine.kind == "torch":
        return
    sampler, mismatch, rollout = config.mismatch.sampler, config.mismatch, config.rollout
    is_class, added = rollout.engine.kind == "function", "the built-in sampler adds the error"
    who, dtype = ("your class", "") if is_class else ("SGLang", ", --dtype in rollout.engine.arguments")
    numerics = "its own numerics" if is_class else "rollout.engine.numerics = stock"
    lacking = [
        ("mismatch.sampler.precision", sampler.precision.rounds, f"{who} has its own precision{dtype}"),
        ("mismatch.sampler.stock", sampler.stock is not None, f"{who} has {numerics}"),
        ("mismatch.sampler.token_bias", sampler.token_bias is not None, added),
        ("rollout.mismatch_sigma", rollout.mismatch_sigma is not None, added),
        ("task.max_turns greater than 1", config.task.turns > 1, f"{who} samples one turn"),
        ("rollout.stop", rollout.stop, f"{who} ends a response by end tokens alone"),
    ]
    if is_class:
        recorded = "a rerun takes the recorded tokens of your class"
        lacking += [
            ("mismatch.flip = token", mismatch.flip == "token", recorded),
            ("mismatch.trainer.retokenize", mismatch.trainer.retokenize > 0, recorded),
            ("ppo.replay_routes", config.ppo.replay_routes, "your class returns no routes"),
        ]
    for field, is_set, why in lacking:
        if is_set:
            yield f"{field} needs rollout.engine.kind = torch: {why}"


def _scoring(config: RunConfig) -> Iterator[str]:
    trainer, rollout = config.mismatch.trainer, config.rollout
    if not (trainer.top_p_scored or rollout.cuts):
        yield "mismatch.trainer.top_p_scored = false needs rollout.top_k or rollout.top_p, whose cut it forgets"
    if not trainer.temperature_scored and rollout.temperature == 1.0:
        yield "mismatch.trainer.temperature_scored = false needs a rollout.temperature other than 1"


def _replayed_routes(config: RunConfig) -> Iterator[str]:
    if not config.ppo.replay_routes:
        return
    trainer, needs = config.mismatch.trainer, "ppo.replay_routes = true needs"
    if config.model.kind == "tiny" and config.model.experts is None:
        yield f"{needs} a mixture of experts, which model.experts makes"
    if config.is_native:
        yield f"{needs} numerics.mode = deterministic"
    if trainer.retokenize > 0:
        yield f"{needs} mismatch.trainer.retokenize = 0: the sampler has no routes for other tokens"
    if trainer.prompts_differ:
        yield (
            f"{needs} the sampler's prompts; remove prompt_before, prompt_after and padding_leak from mismatch.trainer"
        )


def _retokenized(config: RunConfig) -> Iterator[str]:
    trainer, needs = config.mismatch.trainer, "mismatch.trainer.retokenize needs"
    if trainer.retokenize > 0 and config.rollout.cuts and trainer.top_p_scored:
        yield (
            f"{needs} rollout.top_k = 0 and rollout.top_p = 1, or mismatch.trainer.top_p_scored = false: tokens that "
            "were not sampled have no kept set"
        )
    if trainer.retokenize > 0 and config.task.turns > 1:
        yield f"{needs} task.max_turns = 1: an environment's tokens are not encoded again"


def _flip(config: RunConfig) -> Iterator[str]:
    flip, needs = config.mismatch.flip, "mismatch.flip = token needs"
    if flip == "bit" and config.lora is not None:
        yield "mismatch.flip = bit needs lora = null: the reference has the same matrix, or a step makes it again"
    if flip == "token" and config.task.turns > 1:
        yield f"{needs} task.max_turns = 1: the trainer scores all turns, where no token is flipped"
    if flip == "token" and config.rollout.cuts:
        yield (
            f"{needs} rollout.top_k = 0 and rollout.top_p = 1: the kept set may lack the flipped token, whose log-prob "
            "is then -inf"
        )


def _value(config: RunConfig) -> Iterator[str]:
    value, model, group = config.value, config.reward.model, config.advantages.kind == "group"
    unused = "acts on per-token rewards, which advantages.kind = group does not use"
    if config.advantages.kind != "function" and group != (value.kind == "none"):
        if group:
            yield "advantages.kind = group has no use for a value model; take value.kind = none"
        else:
            yield "advantages.kind = gae needs a value model; take value.kind = separate or head"
    if value.kind == "head" and config.lora is not None:
        yield "value.kind = head needs the whole trunk to be trained; remove lora or take kind separate"
    if isinstance(value, SeparateValue) and value.init == "reward_model" and model is None:
        yield "value.init = reward_model needs a term of kind model or trained_model in reward.terms"
    if isinstance(model, TrainedRewardModel) and model.pairs is None and config.task.kind != "arithmetic":
        yield "reward.terms of kind trained_model need pairs, or task.kind = arithmetic, for which pairs are made"
    if group and config.rollout.samples_per_prompt == 1:
        yield "advantages.kind = group needs rollout.samples_per_prompt of at least 2"
    if group and config.reward.placement != "last":
        yield f"reward.placement {unused}"
    if group and config.reward.whiten != "none":
        yield f"reward.whiten {unused}"
    if group and isinstance(config.kl, KLInReward):
        yield f"kl.placement = reward {unused}; take kl.placement = loss or none"
    if group and any(isinstance(term, StepsReward) and term.placement == "step_ends" for term in config.reward.terms):
        yield f"reward.terms of kind steps: placement = step_ends {unused}"


def _task(config: RunConfig) -> Iterator[str]:
    task, kinds = config.task, {type(term) for term in config.reward.terms}
    if config.model.kind == "tiny" and task.chat_template:
        yield "task.chat_template needs model.kind = folder: the tiny tokenizer has no template"
    if Verifier in kinds and not isinstance(task, ReasoningGymTask | PythonTask):
        yield "reward.terms of kind verifier need task.kind = reasoning_gym or python, which bring one"
    if StepsReward in kinds and not isinstance(task, ColumnAdditionTask):
        yield "reward.terms of kind steps need task.kind = column_addition, whose steps are known"
    if FormatReward in kinds and task.answer_extraction != "exact":
        yield "task.answer_extraction must be exact beside a reward term of kind format, which has its own"


CHECKS = (
    _update,
    _engine,
    _sampler,
    _built_in_sampler,
    _scoring,
    _replayed_routes,
    _retokenized,
    _flip,
    _value,
    _task,
)
