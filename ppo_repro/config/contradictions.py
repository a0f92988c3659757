"""Fields of a run that are right alone and wrong together: one line each, with the field to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ppo_repro.config.algorithm import KLInReward, SeparateValue
from ppo_repro.config.layout import not_on_device
from ppo_repro.config.objectives import AdaptiveClipObjective, PenaltyObjective
from ppo_repro.config.reward import FormatReward, StepsReward, TrainedRewardModel, Verifier
from ppo_repro.config.tasks import ArithmeticTask, ColumnAdditionTask, PythonTask, ReasoningGymTask

if TYPE_CHECKING:
    from ppo_repro.config.run import RunConfig

USUAL_ACCURACY_SEQUENCES = 4  # in native numerics, which measure nothing, this says nothing


def contradictions(config: RunConfig) -> list[str]:
    """A line for each contradiction of a run."""
    checks = (_sizes, _numerics, _algorithm, _value, _task, _sampler, _trainer)
    return [*not_on_device(config.layout, config.numerics.mode), *(line for check in checks for line in check(config))]


def _sizes(config: RunConfig) -> Iterator[str]:
    ppo, sequences, tokens = config.ppo, config.sequences_per_iteration, config.rollout.max_response_tokens
    if sequences % ppo.minibatch_size:
        yield (
            f"ppo.minibatch_size = {ppo.minibatch_size} must divide the {sequences} sequences of an iteration "
            "(rollout.prompts_per_iteration x rollout.samples_per_prompt)"
        )
    if ppo.warmup_iterations >= ppo.iterations:
        yield f"ppo.warmup_iterations = {ppo.warmup_iterations} must be smaller than ppo.iterations = {ppo.iterations}"
    if tokens >= config.numerics.max_context:
        yield (
            f"rollout.max_response_tokens = {tokens} must be smaller than "
            f"numerics.max_context = {config.numerics.max_context}"
        )


def _numerics(config: RunConfig) -> Iterator[str]:
    native, engine, ppo, trainer = config.is_native, config.rollout.engine, config.ppo, config.mismatch.trainer
    dense = config.model.kind == "tiny" and config.model.experts is None
    routes = "ppo.replay_routes = true needs"
    if native and config.numerics.accuracy_sequences not in (0, USUAL_ACCURACY_SEQUENCES):
        yield "numerics.accuracy_sequences needs numerics.mode = deterministic; native numerics measure nothing"
    if native and engine.kind == "sglang" and engine.numerics == "deterministic":
        yield "rollout.engine.numerics = deterministic needs numerics.mode = deterministic; stock goes with both"
    if ppo.replay_routes and dense:
        yield f"{routes} a mixture of experts, which model.experts makes"
    if ppo.replay_routes and native:
        yield f"{routes} numerics.mode = deterministic, whose routers take routes"
    if ppo.replay_routes and trainer.retokenize:
        yield f"{routes} mismatch.trainer.retokenize = 0: tokens that were not sampled have no route"
    if ppo.replay_routes and trainer.prompts_differ:
        yield f"{routes} the sampler's prompts; remove prompt_before, prompt_after and padding_leak"


def _algorithm(config: RunConfig) -> Iterator[str]:
    ppo, kl = config.ppo, config.kl
    one_step = ppo.epochs == 1 and ppo.minibatch_size == config.sequences_per_iteration
    adaptive = isinstance(ppo.objective, AdaptiveClipObjective | PenaltyObjective) and ppo.objective.target_kl
    needs_steps = "needs more than one optimizer step per iteration to see a KL"
    if ppo.importance_weights is not None and ppo.ratio_anchor != "old":
        yield "ppo.importance_weights needs ppo.ratio_anchor = old: with rollout the ratio corrects already"
    if one_step and adaptive:
        yield f"ppo.objective.target_kl {needs_steps}"
    if one_step and ppo.early_stop_kl is not None:
        yield f"ppo.early_stop_kl {needs_steps}"
    if isinstance(kl, KLInReward) and kl.controller.kind == "adaptive" and not kl.kl_coef:
        yield "kl.controller.kind = adaptive needs a kl.kl_coef above 0: it multiplies it"


def _value(config: RunConfig) -> Iterator[str]:
    value, model, group = config.value, config.reward.model, config.advantages.kind == "group"
    unused = "acts on per-token rewards, which advantages.kind = group does not use"
    if group != (value.kind == "none"):
        yield "advantages.kind = gae needs a value model, and group has no use for one: value.kind = none"
    if value.kind == "head" and config.lora is not None:
        yield "value.kind = head needs the whole trunk to be trained; remove lora or take kind separate"
    if isinstance(value, SeparateValue) and value.init == "reward_model" and model is None:
        yield "value.init = reward_model needs a term of kind model or trained_model in reward.terms"
    makes_pairs = isinstance(model, TrainedRewardModel) and model.pairs is None
    if makes_pairs and not isinstance(config.task, ArithmeticTask):
        yield "reward.terms of kind trained_model need pairs, or task.kind = arithmetic, for which pairs are made"
    if group and config.rollout.samples_per_prompt == 1:
        yield "advantages.kind = group needs rollout.samples_per_prompt of at least 2"
    if group and config.reward.placement != "last":
        yield f"reward.placement {unused}"
    if group and config.reward.whiten != "none":
        yield f"reward.whiten {unused}"
    if group and isinstance(config.kl, KLInReward):
        yield f"kl.placement = reward {unused}"


def _task(config: RunConfig) -> Iterator[str]:
    task, terms, sglang = config.task, config.reward.terms, config.rollout.engine.kind == "sglang"
    if config.model.kind == "tiny" and task.chat_template:
        yield "task.chat_template needs model.kind = folder: the tiny tokenizer has no template"
    if any(isinstance(t, Verifier) for t in terms) and not isinstance(task, ReasoningGymTask | PythonTask):
        yield "reward.terms of kind verifier need task.kind = reasoning_gym or python, which bring one"
    if any(isinstance(t, StepsReward) for t in terms) and not isinstance(task, ColumnAdditionTask):
        yield "reward.terms of kind steps need task.kind = column_addition, whose steps are known"
    if task.answer_extraction != "exact" and any(isinstance(term, FormatReward) for term in terms):
        yield "task.answer_extraction must be exact beside a reward term of kind format, which has its own"
    if sglang and task.turns > 1:
        yield "task.max_turns greater than 1 needs rollout.engine.kind = torch: SGLang samples one turn"
    if sglang and config.rollout.stop:
        yield "rollout.stop needs rollout.engine.kind = torch: SGLang's servers here have no tokenizer"


def _sampler(config: RunConfig) -> Iterator[str]:
    sampler, native, sglang = config.mismatch.sampler, config.is_native, config.rollout.engine.kind == "sglang"
    field = "mismatch.sampler"
    elsewhere = (
        "needs rollout.engine.kind = torch; SGLang's own precision is that of rollout.engine.numerics = stock "
        "with --dtype in rollout.engine.arguments"
    )
    if native and sampler.precision.rounds:
        yield f"{field}.precision needs numerics.mode = deterministic, whose products it rounds"
    if native and sampler.stock == "float32":
        yield f"{field}.stock = float32 needs numerics.mode = deterministic; native numerics sample by torch's float32"
    if sglang and sampler.precision.rounds:
        yield f"{field}.precision {elsewhere}"
    if sglang and sampler.stock is not None:
        yield f"{field}.stock {elsewhere}"
    if sglang and sampler.token_bias is not None:
        yield f"{field}.token_bias needs rollout.engine.kind = torch, whose sampler adds the error"
    if sampler.lag > 0 and config.ppo.iterations == 1:
        yield f"{field}.lag needs ppo.iterations of at least 2: the first one has no older weights"


def _trainer(config: RunConfig) -> Iterator[str]:
    trainer, rollout, field = config.mismatch.trainer, config.rollout, "mismatch.trainer"
    cuts = rollout.top_k > 0 or rollout.top_p < 1.0
    if not (trainer.top_p_scored or cuts):
        yield f"{field}.top_p_scored = false needs rollout.top_k or rollout.top_p, whose cut it forgets"
    if not trainer.temperature_scored and rollout.temperature == 1.0:
        yield f"{field}.temperature_scored = false needs a rollout.temperature other than 1"
    if trainer.retokenize > 0 and cuts and trainer.top_p_scored:
        yield (
            f"{field}.retokenize needs rollout.top_k = 0 and rollout.top_p = 1, or {field}.top_p_scored = false: "
            "tokens that were not sampled have no kept set"
        )
    if trainer.retokenize > 0 and config.task.turns > 1:
        yield f"{field}.retokenize needs task.max_turns = 1: an environment's tokens are not encoded again"
