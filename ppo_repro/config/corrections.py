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
LEVEL = "Ratio w of the token, of its whole response (the product), or its response's geometric mean."
NORMALIZE = "Divide the weights of an iteration by their mean over tokens, or over responses at the other levels."


def _require_below_one(floor: float | None) -> None:
    if floor is not None and floor >= 1.0:
        raise ValueError(f"floor = {floor} must be smaller than 1, the weight where both policies agree")


class UnboundedWeights(Section):
    """w itself: decoupled PPO."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"normalize"})

    kind: Literal["unbounded"] = Field(description="Take w as it is.")
    level: Level = Field("token", description=LEVEL)
    normalize: bool = Field(False, description=NORMALIZE)


class TruncatedWeights(Section):
    """min(w, cap), with `floor` bounded on both sides."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"floor", "normalize"})

    kind: Literal["truncated"] = Field(description="Bound w.")
    level: Level = Field("token", description=LEVEL)
    cap: WeightCap = Field(2.0, description="Largest weight.")
    floor: NonNegative | None = Field(None, description="Smallest weight; null: no bound below.")
    normalize: bool = Field(False, description=NORMALIZE)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        _require_below_one(self.floor)
        return self


class MaskedWeights(Section):
    """w where floor <= w <= cap, and 0 elsewhere."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"floor", "normalize"})

    kind: Literal["masked"] = Field(description="Set w to 0 outside its bounds.")
    level: Level = Field("token", description=LEVEL)
    cap: WeightCap = Field(2.0, description="Larger weights become 0.")
    floor: NonNegative | None = Field(None, description="Smaller weights become 0; null: 1 / cap; 0: none do.")
    normalize: bool = Field(False, description=NORMALIZE)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        _require_below_one(self.floor)
        return self


ImportanceWeights = Annotated[UnboundedWeights | TruncatedWeights | MaskedWeights, Field(discriminator="kind")]


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
