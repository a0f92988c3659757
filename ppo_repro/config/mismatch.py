"""Causes of a mismatch between sampler and trainer, one by one and as large as wanted: the `mismatch` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.faults import SamplerFaults, TrainerFaults
from ppo_repro.config.section import Section

Wide = Literal["float32", "bfloat16", "float16"]
Format = Literal["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int8"]
_FORMATS_OF_8_BITS = ("float8_e4m3", "float8_e5m2", "int8")


class SamplerPrecision(Section):
    """The formats that numbers are rounded to, as in a stack of that precision. Products stay exact."""

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
        if self.rest != "float32" and not {self.weights, self.activations} & set(_FORMATS_OF_8_BITS):
            raise ValueError("rest is for what weights or activations of 8 bits leave alone; remove it")
        return self

    @property
    def rounds(self) -> bool:
        """Whether any format is named."""
        return any(getattr(self, name) != "float32" for name in type(self).model_fields)

    @property
    def forward_formats(self) -> tuple[str, ...]:
        """The formats of a forward pass: sides with the same ones compute the same bits."""
        return self.weights, self.activations, self.rest, self.kv_cache, self.logits


class TrainerPrecision(SamplerPrecision):
    """The same of the trainer, and of its backward pass. Weights it changes stay float32."""

    gradients: Format = Field(
        "float32",
        description="Of gradients of activations, wherever 16 bits round an activation; float32: none.",
    )


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


class TrainerSide(TrainerFaults):
    """What is made to differ in the trainer."""

    absent_at_default: ClassVar[frozenset[str]] = TrainerFaults.absent_at_default | {"precision"}

    precision: TrainerPrecision = TrainerPrecision()


class MismatchConfig(Section):
    """What is made to differ between sampler and trainer; nothing by default. Every cause is part of the run."""

    # a configuration without a cause is written down, and named, as one of an exact run
    absent_at_default: ClassVar[frozenset[str]] = frozenset({"sampler", "trainer"})

    sampler: SamplerSide = SamplerSide()
    trainer: TrainerSide = TrainerSide()

    @property
    def same_precision(self) -> bool:
        """Whether a forward pass of sampler and trainer gives the same bits, as far as precision goes."""
        same_formats = self.sampler.precision.forward_formats == self.trainer.precision.forward_formats
        return self.sampler.stock is None and same_formats


def not_possible(config: MismatchConfig, mode: str, engine: str) -> Iterator[str]:
    """A line for each cause that numerics of this mode, or an engine of this kind, do not have."""
    for side, precision in (("sampler", config.sampler.precision), ("trainer", config.trainer.precision)):
        if precision.rounds and mode == "native":
            yield f"mismatch.{side}.precision needs numerics.mode = exact, whose products it rounds"
    for field, is_set in (("precision", config.sampler.precision.rounds), ("stock", config.sampler.stock is not None)):
        if is_set and engine == "sglang":
            yield (
                f"mismatch.sampler.{field} needs rollout.engine.kind = torch; SGLang's own precision is that of "
                "rollout.engine.numerics = stock with --dtype in rollout.engine.arguments"
            )


def has_no_routes(config: MismatchConfig, mode: str, engine: str, dense: bool) -> Iterator[str]:
    """A line for each setting with which the sampler has no routes that the trainer could take."""
    field = "ppo.replay_routes = true"
    if dense:
        yield f"{field} needs a mixture of experts, which model.experts makes"
    if mode == "native":
        yield f"{field} needs numerics.mode = exact, whose routers take routes"
    if engine == "sglang":
        yield f"{field} needs rollout.engine.kind = torch; SGLang's servers return no routes here"
    if config.trainer.retokenize:
        yield f"{field} needs mismatch.trainer.retokenize = 0: tokens that were not sampled have no route"
    if config.trainer.prompts_differ:
        yield f"{field} needs the sampler's prompts; remove prompt_before, prompt_after and padding_leak"
