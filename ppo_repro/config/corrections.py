"""Corrections for tokens that another policy sampled than the one that is trained: weights, and rejection.

w = pi_old / pi_rollout, of a token, of its whole response (the product over its tokens), or the geometric mean of its
response's. Everything here is a constant in the loss: no gradient flows through w.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.objectives import WeightCap
from ppo_repro.config.section import NonNegative, Positive, Section

Level = Literal["token", "sequence", "geometric"]


class ImportanceWeights(Section):
    """Correction of a sampler that is not the policy that is trained: w on every token's surrogate."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"floor", "normalize"})

    kind: Literal["truncated", "masked"] = Field(
        description="Either w within [floor, cap], or 0 where w is outside [floor, cap]."
    )
    level: Level = Field(
        "token",
        description="Ratio w of the token, of its whole response (the product), or its response's geometric mean.",
    )
    cap: WeightCap | None = Field(2.0, description="Largest w; null: none, so that truncated weights are w itself.")
    floor: NonNegative | None = Field(
        None, description="Smallest w; null: none, or for masked weights with a cap 1 / cap."
    )
    normalize: bool = Field(
        False, description="Divide by the mean over an iteration's tokens, or responses at the other levels."
    )

    @model_validator(mode="after")
    def _bounds_are_around_one(self) -> Self:
        if self.floor is not None and self.floor >= 1.0:
            raise ValueError(f"floor = {self.floor} must be smaller than 1, the weight where both policies agree")
        if self.kind == "masked" and self.cap is None and not self.floor:
            raise ValueError("kind = masked without cap and floor masks nothing; give one, or take kind truncated")
        return self

    @property
    def lowest(self) -> float:
        """The lower bound, 0 for none: floor, or for masked weights by default 1 / cap."""
        if self.floor is None and self.kind == "masked" and self.cap is not None:
            return 1.0 / self.cap
        return self.floor or 0.0


class RatioRejection(Section):
    """Tokens, or whole responses, whose w is outside [low, high] are rejected."""

    kind: Literal["ratio"] = Field(description="Reject by w.")
    level: Level = Field("token", description="Reject tokens by their w, or responses by product or geometric mean.")
    low: NonNegative = Field(description="Smaller w are rejected.")
    high: WeightCap = Field(description="Larger w are rejected.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low >= 1.0:
            raise ValueError(f"low = {self.low} must be smaller than 1, the ratio where both policies agree")
        return self


class DivergenceRejection(Section):
    """Tokens, or whole responses, with a large estimate of KL(rollout || old) are rejected."""

    kind: Literal["divergence"] = Field(description="Reject by an estimate of the KL.")
    estimator: Literal["k2", "k3"] = Field("k3", description="Of KL(rollout || old), from the sampled token.")
    level: Literal["token", "sum", "mean", "max"] = Field(
        "token", description="Reject tokens by their own, or responses by sum, mean or maximum over their tokens."
    )
    above: Positive = Field(description="Larger estimates are rejected, nats.")


class VetoRejection(Section):
    """Whole responses with a token that the trainer finds far less likely than the sampler are rejected."""

    kind: Literal["veto"] = Field(description="Reject a response by its smallest w of a token.")
    below: Annotated[float, Field(gt=0, lt=1)] = Field(1e-4, description="A single w below this rejects the response.")


Rejection = Annotated[RatioRejection | DivergenceRejection | VetoRejection, Field(discriminator="kind")]
