"""What the policy's update maximises, and its corrections for tokens that another policy sampled.

`kind` chooses one of several, so that no field is without effect.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.section import BelowOne, Finite, Positive, Section

ClipBound = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
CLIP_RANGE_MIN, CLIP_RANGE_MAX = 0.02, 0.5  # of the adaptive clip range
WeightCap = Annotated[float, Field(gt=1, allow_inf_nan=False)]  # both policies agree at 1


class Clipped(Section):
    """A ratio between 1 - clip_range and 1 + clip_range_high."""

    clip_range: ClipBound = Field(0.2, description="Ratios below 1 - clip_range are not pushed further down.")
    clip_range_high: Positive | None = Field(None, description="The same above 1; null: clip_range.")

    @property
    def high(self) -> float:
        """The upper clip range, clip_range_high or by default clip_range."""
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


class ClipObjective(Clipped):
    """The clipped surrogate of PPO, with clip-higher and dual clip."""

    kind: Literal["clip"] = Field("clip", description="Clip the ratio within fixed bounds.")
    dual_clip: WeightCap | None = Field(None, description="Largest ratio with a gradient if A < 0; null: no dual clip.")

    @model_validator(mode="after")
    def _dual_is_outside(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1.0 + self.high:
            raise ValueError(f"dual_clip = {self.dual_clip} must be greater than 1 + the upper clip range {self.high}")
        return self


class AdaptiveClipObjective(Section):
    """The clipped surrogate with a clip range that follows KL(anchor || new)."""

    kind: Literal["adaptive_clip"] = Field(description="Clip the ratio within bounds that follow the KL.")
    clip_range: Annotated[float, Field(ge=CLIP_RANGE_MIN, le=CLIP_RANGE_MAX)] = Field(
        0.2, description="Clip range of the first iteration, on both sides; it stays within 0.02 and 0.5."
    )
    target_kl: Positive = Field(description="Halve above 1.5 times this, double below it / 1.5; nats per token.")


class PenaltyObjective(Section):
    """PPO-Penalty: the unclipped surrogate minus beta KL(anchor || new)."""

    kind: Literal["kl_penalty"] = Field(description="Penalise the KL instead of clipping.")
    penalty_coef: Positive = Field(1.0, description="Weight beta of the first iteration.")
    target_kl: Positive | None = Field(None, description="Beta follows this, nats per token; null: fixed.")


class SequenceClipObjective(Clipped):
    """GSPO: the clipped surrogate with one length-normalised ratio for the whole response."""

    kind: Literal["sequence_clip"] = Field(description="Clip the geometric mean of a response's ratios.")
    clip_range: ClipBound = Field(3e-4, description="Lower clip range of the response's ratio.")
    clip_range_high: Positive | None = Field(4e-4, description="Upper clip range of the ratio; null: as clip_range.")


class CispoObjective(Section):
    """CISPO: the policy gradient with a bounded ratio as its weight; every token keeps a gradient."""

    kind: Literal["cispo"] = Field(description="Bound the ratio as a weight of the policy gradient.")
    cap: WeightCap = Field(5.0, description="Largest weight.")
    floor: BelowOne = Field(0.0, description="Smallest weight; 0 for no bound below.")


class ClipCovObjective(Clipped):
    """Clip-Cov: a random few of the tokens with high covariance of log-prob and advantage have no gradient."""

    kind: Literal["clip_cov"] = Field(description="Draw tokens of high covariance, and drop their gradient.")
    share: Share = Field(2e-4, description="Share of a minibatch's tokens that are drawn, at least one token.")
    covariance_low: Finite = Field(1.0, description="Only tokens with more covariance than this are drawn.")
    covariance_high: Finite = Field(5.0, description="Only tokens with less covariance than this are drawn.")
    clip_range: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="The ratio is clipped below 1 - clip_range besides; 1 for no bound below."
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.covariance_low >= self.covariance_high:
            raise ValueError(
                f"covariance_low = {self.covariance_low} must be smaller than covariance_high = {self.covariance_high}"
            )
        return self


class KLCovObjective(Section):
    """KL-Cov: the tokens with the highest covariance of log-prob and advantage get a KL penalty; no clip."""

    kind: Literal["kl_cov"] = Field(description="Penalise the KL of the tokens with the highest covariance.")
    share: Share = Field(2e-4, description="Share of a minibatch's tokens that are penalised, at least one token.")
    penalty_coef: Positive = Field(1.0, description="Weight of |log ratio| on these tokens.")


class UnclippedObjective(Section):
    """The importance-sampled surrogate without any bound, L_CPI."""

    kind: Literal["unclipped"] = Field(description="Neither clip nor penalise.")


class PolicyGradientObjective(Section):
    """REINFORCE with a baseline: log pi times advantage, no ratio."""

    kind: Literal["policy_gradient"] = Field(description="Use no ratio.")


Objective = Annotated[
    ClipObjective
    | AdaptiveClipObjective
    | SequenceClipObjective
    | CispoObjective
    | ClipCovObjective
    | KLCovObjective
    | PenaltyObjective
    | UnclippedObjective
    | PolicyGradientObjective,
    Field(discriminator="kind"),
]


# w = pi_old / pi_rollout below: of a token, of its whole response (the product over its tokens), or the geometric mean
# of its response's. Everything that follows is a constant in the loss: no gradient flows through w.
Level = Literal["token", "sequence", "geometric"]


class ImportanceWeights(Section):
    """Correction of a sampler that is not the policy that is trained: w on every token's surrogate."""

    kind: Literal["truncated", "masked"] = Field(description="Clip w to [floor, cap], or set w outside to 0.")
    level: Level = Field(
        "token",
        description="Ratio w of the token, of its whole response (the product), or its response's geometric mean.",
    )
    cap: WeightCap | None = Field(2.0, description="Largest w; null: none, so that truncated weights are w itself.")
    floor: BelowOne | None = Field(None, description="Smallest w; null: none, or 1 / cap for masked weights.")
    normalize: bool = Field(False, description="Divide by the mean over the iteration's tokens, or its responses.")

    @model_validator(mode="after")
    def _masks_something(self) -> Self:
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
    low: BelowOne = Field(description="Smaller w are rejected.")
    high: WeightCap = Field(description="Larger w are rejected.")


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
