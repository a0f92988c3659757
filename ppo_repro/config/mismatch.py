"""Configure `mismatch`: deliberate differences between sampler and trainer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.section import FIXED, BelowOne, Fraction, Index, Positive, Section

Wide = Literal["float32", "bfloat16", "float16"]
Format = Literal["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int8"]
FORMATS_OF_8_BITS = ("float8_e4m3", "float8_e5m2", "int8")
AddedText = Annotated[str, Field(max_length=1000)]


class TrainerFaults(Section):
    """Deliberate differences of the trainer from the sampler."""

    top_p_scored: bool = Field(True, description="Renormalise over the tokens that top-k and top-p kept.")
    temperature_scored: bool = Field(True, description="Divide logits by the temperature, as the sampler does.")
    prompt_before: AddedText = Field("", description="Only the trainer has this text before each prompt, e.g. a BOS.")
    prompt_after: AddedText = Field(
        "", description="Only the trainer has this text after each prompt; a second chat template sets both."
    )
    padding_leak: Index = Field(0, description="Pad shorter prompts on the left to so many tokens, without a mask.")
    retokenize: Fraction = Field(0.0, description="Share of responses decoded and encoded again before training.")
    eos_in_loss: bool = Field(True, description="End tokens have a loss like any other token.")
    dropout: BelowOne = Field(0.0, description="Probability of dropping a number of the policy's last hidden states.")

    @property
    def prompts_differ(self) -> bool:
        return bool(self.prompt_before or self.prompt_after or self.padding_leak)

    @property
    def scores_otherwise(self) -> bool:
        """Return whether the trainer's log-prob of a token may differ from the sampler's."""
        cuts = not (self.top_p_scored and self.temperature_scored)
        return cuts or self.prompts_differ or self.retokenize > 0 or self.dropout > 0


class SamplerPrecision(Section):
    """The formats to which the sampler rounds numbers, like a stack of that precision. Products stay in float32."""

    weights: Format = Field("float32", description="Of weights; 8 bits: of linear layers of attention and MLP only.")
    activations: Format = Field("float32", description="Of activations; 8 bits: only of the inputs of these layers.")
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
        """Return whether any format is named."""
        return any(getattr(self, name) != "float32" for name in type(self).model_fields)


class SamplerFaults(Section):
    """Deliberate differences of the sampler's policy from the trained policy."""

    lag: Annotated[Index, FIXED] = Field(
        0, description="Iterations that the sampler's weights are behind, fewer at first; 0: none."
    )
    token_bias: Positive | None = Field(None, description="Size of an error of each token's logit; null: none.")
    precision: SamplerPrecision = SamplerPrecision()
    stock: Wide | None = Field(None, description="Sample by torch in this dtype, bits not promised; null: do not.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.stock is not None and self.precision.rounds:
            raise ValueError("stock rounds as torch does, so precision has no effect; remove one of them")
        return self


class MismatchConfig(Section):
    """Deliberate differences between sampler and trainer; none by default. All of them are part of the run."""

    sampler: SamplerFaults = SamplerFaults()
    trainer: TrainerFaults = TrainerFaults()
    flip: Annotated[Literal["bit", "token"] | None, FIXED] = Field(
        None, description="The last bit of a weight, or the first token, is another in this run; null: nothing."
    )

    @property
    def machine_dependent_setting(self) -> str | None:
        """Return the setting that makes stock torch sample, so that bits depend on the machine; None otherwise."""
        return None if self.sampler.stock is None else f"mismatch.sampler.stock = {self.sampler.stock}"

    @property
    def same_precision(self) -> bool:
        """Return whether sampler and trainer use the same precision in a forward pass."""
        return self.sampler.stock is None and not self.sampler.precision.rounds
