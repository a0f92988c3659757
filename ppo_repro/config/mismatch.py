"""Causes of a mismatch between sampler and trainer, one by one and as large as wanted: the `mismatch` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.engine import RolloutConfig
from ppo_repro.config.section import Fraction, Index, Positive, Section

Wide = Literal["float32", "bfloat16", "float16"]
Format = Literal["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int8"]
FORMATS_OF_8_BITS = ("float8_e4m3", "float8_e5m2", "int8")
AddedText = Annotated[str, Field(max_length=1000)]


class SamplerFaults(Section):
    """What makes the sampler another policy than the one that is trained."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"lag", "token_bias"})

    lag: Index = Field(
        0, description="Iterations that the sampler's weights are behind, fewer at the beginning; 0: none."
    )
    token_bias: Positive | None = Field(
        None,
        description="The sampler sees logits / temperature plus an error of each token of this size; null: none.",
    )


class TrainerFaults(Section):
    """What the trainer takes otherwise than the sampler did."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset(
        {
            *("top_p_scored", "temperature_scored", "prompt_before", "prompt_after", "padding_leak"),
            *("retokenize", "eos_in_loss", "dropout"),
        }
    )

    top_p_scored: bool = Field(True, description="Renormalise over the tokens that top-k and top-p kept.")
    temperature_scored: bool = Field(True, description="Divide logits by the temperature, as the sampler does.")
    prompt_before: AddedText = Field("", description="Text before each prompt that only the trainer has; a second BOS.")
    prompt_after: AddedText = Field("", description="The same after each prompt; a second chat template is both.")
    padding_leak: Index = Field(
        0, description="Shorter prompts are padded to so many tokens on the left, and no mask hides that; 0: none."
    )
    retokenize: Fraction = Field(
        0.0, description="Share of the responses that are decoded and encoded again before training; 0 for none."
    )
    eos_in_loss: bool = Field(True, description="End tokens have a loss like any other token.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Probability that a number in the policy's last hidden states is dropped in training."
    )

    @property
    def prompts_differ(self) -> bool:
        return bool(self.prompt_before or self.prompt_after or self.padding_leak)

    @property
    def scores_otherwise(self) -> bool:
        """Whether a log-prob of the trainer may be another one than the sampler's."""
        cuts = not (self.top_p_scored and self.temperature_scored)
        return cuts or self.prompts_differ or self.retokenize > 0 or self.dropout > 0


class SamplerPrecision(Section):
    """The formats that the sampler rounds numbers to, as a stack of that precision does. Products stay exact."""

    weights: Format = Field(
        "float32", description="Of weights: 16 bits of all of them, 8 bits of the linear layers of attention and MLP."
    )
    activations: Format = Field(
        "float32", description="Of activations: 16 bits at every place, 8 bits of the inputs of those linear layers."
    )
    rest: Wide = Field("float32", description="Of the weights and activations that formats of 8 bits leave alone.")
    kv_cache: Format = Field("float32", description="Of keys and values as attention reads them.")
    logits: Format = Field("float32", description="Of logits.")

    @model_validator(mode="after")
    def _rest_of_something(self) -> Self:
        if self.rest != "float32" and not {self.weights, self.activations} & set(FORMATS_OF_8_BITS):
            raise ValueError("rest is for what weights or activations of 8 bits leave alone; remove it")
        return self

    @property
    def rounds(self) -> bool:
        """Whether any format is named."""
        return any(getattr(self, name) != "float32" for name in type(self).model_fields)

    @property
    def only_logits(self) -> bool:
        """Whether logits are rounded and nothing else."""
        return {name for name in type(self).model_fields if getattr(self, name) != "float32"} == {"logits"}


class SamplerSide(SamplerFaults):
    """What is made to differ in the sampler."""

    absent_at_default: ClassVar[frozenset[str]] = SamplerFaults.absent_at_default | {"precision", "stock"}

    precision: SamplerPrecision = SamplerPrecision()
    stock: Wide | None = Field(
        None,
        description="Sample by torch's own forward pass in this dtype, no bit of which is promised; null: do not.",
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.stock is not None and self.precision.rounds:
            raise ValueError("stock rounds as torch does, so precision has no effect; remove one of them")
        return self


class MismatchConfig(Section):
    """What is made to differ between sampler and trainer; nothing by default. Every cause is part of the run."""

    # a configuration without a cause is written down, and named, as one of an exact run
    absent_at_default: ClassVar[frozenset[str]] = frozenset({"sampler", "trainer"})

    sampler: SamplerSide = SamplerSide()
    trainer: TrainerFaults = TrainerFaults()

    @property
    def bound(self) -> str:
        """The setting by which torch itself samples, so that bits belong to a kind of machine; empty without it."""
        return "" if self.sampler.stock is None else f"mismatch.sampler.stock = {self.sampler.stock}"

    @property
    def same_precision(self) -> bool:
        """Whether a forward pass of sampler and trainer gives the same bits, as far as precision goes."""
        return self.sampler.stock is None and not self.sampler.precision.rounds


def not_possible(config: MismatchConfig, mode: str, engine: str) -> Iterator[str]:
    """A line for each cause that numerics of this mode, or an engine of this kind, do not have."""
    if config.sampler.precision.rounds and mode == "native":
        yield "mismatch.sampler.precision needs numerics.mode = deterministic, whose products it rounds"
    if config.sampler.stock == "float32" and mode == "native":
        yield (
            "mismatch.sampler.stock = float32 needs numerics.mode = deterministic; native numerics sample by torch's "
            "float32"
        )
    for field, is_set in (("precision", config.sampler.precision.rounds), ("stock", config.sampler.stock is not None)):
        if is_set and engine == "sglang":
            yield (
                f"mismatch.sampler.{field} needs rollout.engine.kind = torch; SGLang's own precision is that of "
                "rollout.engine.numerics = stock with --dtype in rollout.engine.arguments"
            )


def has_no_routes(config: MismatchConfig, mode: str, dense: bool) -> Iterator[str]:
    """A line for each setting with which the sampler has no routes that the trainer could take."""
    field = "ppo.replay_routes = true"
    if dense:
        yield f"{field} needs a mixture of experts, which model.experts makes"
    if mode == "native":
        yield f"{field} needs numerics.mode = deterministic, whose routers take routes"
    if config.trainer.retokenize:
        yield f"{field} needs mismatch.trainer.retokenize = 0: tokens that were not sampled have no route"
    if config.trainer.prompts_differ:
        yield f"{field} needs the sampler's prompts; remove prompt_before, prompt_after and padding_leak"


def contradictions(
    sampler: SamplerFaults, trainer: TrainerFaults, rollout: RolloutConfig, turns: int, iterations: int
) -> Iterator[str]:
    """A line for each fault that would have no effect, or that cannot be combined with the rest."""
    cuts = rollout.top_k > 0 or rollout.top_p < 1.0
    own_prefix, prefix = "mismatch.sampler", "mismatch.trainer"
    if not (trainer.top_p_scored or cuts):
        yield f"{prefix}.top_p_scored = false needs rollout.top_k or rollout.top_p, whose cut it forgets"
    if not trainer.temperature_scored and rollout.temperature == 1.0:
        yield f"{prefix}.temperature_scored = false needs a rollout.temperature other than 1"
    if trainer.retokenize and cuts and trainer.top_p_scored:
        yield (
            f"{prefix}.retokenize needs rollout.top_k = 0 and rollout.top_p = 1, or {prefix}.top_p_scored = false: "
            "tokens that were not sampled have no kept set"
        )
    if trainer.retokenize and turns > 1:
        yield f"{prefix}.retokenize needs task.max_turns = 1: an environment's tokens are not encoded again"
    if rollout.engine.kind == "sglang" and sampler.token_bias is not None:
        yield f"{own_prefix}.token_bias needs rollout.engine.kind = torch, whose sampler adds the error"
    if sampler.lag and iterations == 1:
        yield f"{own_prefix}.lag needs ppo.iterations of at least 2: the first one has no older weights"
