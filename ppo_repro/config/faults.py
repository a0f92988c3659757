"""The usual bugs between sampler and trainer, on purpose: old weights, and what the trainer takes otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ppo_repro.config.engine import RolloutConfig
from ppo_repro.config.section import Count, Fraction, Index, Positive, Section

_PerVersion = Annotated[
    Count | None,
    Field(
        description="After so many tokens a response goes on with the next version's weights; null: it keeps its own."
    ),
]
AddedText = Annotated[str, Field(max_length=1000)]


class FixedLag(Section):
    """The sampler is the same number of iterations behind for every response."""

    kind: Literal["fixed"] = Field(description="Every response has the same lag.")
    iterations: Count = Field(description="Iterations that the sampler's weights are behind; fewer at the beginning.")
    tokens_per_version: _PerVersion = None

    @property
    def most(self) -> int:
        return self.iterations


class DrawnLag(Section):
    """Every response has a lag of its own, drawn by the seed."""

    kind: Literal["drawn"] = Field(description="Draw each response's lag, uniformly from 0 up.")
    max_iterations: Count = Field(description="The largest lag, in iterations; smaller at the beginning.")
    tokens_per_version: _PerVersion = None

    @property
    def most(self) -> int:
        return self.max_iterations


LagConfig = Annotated[FixedLag | DrawnLag, Field(discriminator="kind")]


class SamplerFaults(Section):
    """What makes the sampler another policy than the one that is trained."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"lag", "token_bias"})

    lag: LagConfig | None = Field(
        None, description="Sample with the weights of earlier iterations; null: with the newest."
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
    lag = sampler.lag
    if lag is None:
        return
    if rollout.engine.kind == "sglang":
        yield f"{own_prefix}.lag needs rollout.engine.kind = torch: SGLang's servers here have the newest weights"
    if iterations == 1:
        yield f"{own_prefix}.lag needs ppo.iterations of at least 2: the first one has no older weights"
    if lag.tokens_per_version is None:
        return
    if lag.tokens_per_version >= rollout.max_response_tokens:
        yield (
            f"{own_prefix}.lag.tokens_per_version = {lag.tokens_per_version} must be smaller than "
            f"rollout.max_response_tokens = {rollout.max_response_tokens}"
        )
    if turns > 1 or rollout.stop:
        yield f"{own_prefix}.lag.tokens_per_version needs task.max_turns = 1 and rollout.stop = []"
