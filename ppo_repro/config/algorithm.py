"""Configure the algorithm: objective, corrections, advantages, value model, KL, optimizers.

If methods have different fields, `kind` chooses a method, so that every field has an effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.section import (
    FIXED,
    FUNCTION,
    WORD,
    WORD_OR_FUNCTION,
    BelowOne,
    CheckedFunction,
    Count,
    Fraction,
    Index,
    Many,
    NonNegative,
    Positive,
    RateSchedule,
    Section,
    Whitening,
    default_kind,
)

# Below, w is pi_old / pi_rollout of a token, or the product of these ratios over its response, or their geometric mean.
RatioLevel = Literal["token", "sequence", "geometric"]
DivergenceLevel = Literal["token", "sum", "mean", "max"]
KLEstimator = Literal["k1", "k2", "k3", "exact"]
KLDirection = Literal["policy_reference", "reference_policy"]
KLCharge = Literal["token", "word", "length_normalized", "last_sum", "last_mean"]
Anchor = Literal["rollout", "old"]

ClipBound = Annotated[float, Field(gt=0, lt=1)]
CLIP_RANGE_MIN, CLIP_RANGE_MAX = 0.02, 0.5  # of the adaptive clip range
WeightCap = Annotated[float, Field(gt=1, allow_inf_nan=False)]  # both policies agree at 1


class Clipped(Section):
    """The clip of the ratio to [1 - clip_range, 1 + clip_range_high]."""

    clip_range: ClipBound = Field(0.2, description="Ratios below 1 - clip_range are not pushed further down.")
    clip_range_high: Positive | None = Field(
        None, description="Ratios above 1 + this are not pushed further up; null: clip_range."
    )

    @property
    def high(self) -> float:
        """Return the upper clip range: clip_range_high, or by default clip_range."""
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
        0.2,
        description="Clip range of the first iteration, on both sides; "
        f"stays within {CLIP_RANGE_MIN} and {CLIP_RANGE_MAX}.",
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


class UnclippedObjective(Section):
    """The importance-sampled surrogate without a bound, L_CPI."""

    kind: Literal["unclipped"] = Field(description="Neither clip nor penalise.")


class PolicyGradientObjective(Section):
    """REINFORCE with a baseline: log pi times advantage, no ratio."""

    kind: Literal["policy_gradient"] = Field(description="Use no ratio.")


class FunctionObjective(CheckedFunction):
    """A function of your own, called with a batch of tokens; it returns the loss of each token or response."""


Objective = Annotated[
    ClipObjective
    | AdaptiveClipObjective
    | SequenceClipObjective
    | CispoObjective
    | PenaltyObjective
    | UnclippedObjective
    | PolicyGradientObjective
    | FunctionObjective,
    Field(discriminator="kind"),
    default_kind("kind", "clip"),
]


class ImportanceWeights(Section):
    """Importance weights: each token's surrogate loss is multiplied by w = pi_old / pi_rollout.

    Weights are constants in the loss: no gradient flows through them.
    """

    kind: Literal["truncated", "masked"] = Field(description="Clip w to [floor, cap], or set w outside to 0.")
    level: RatioLevel = Field(
        "token", description="w of the token, or the product or geometric mean over its response."
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
        """Return the lower bound of w: `floor`, else 1 / cap for masked weights, else 0."""
        if self.floor is None and self.kind == "masked" and self.cap is not None:
            return 1.0 / self.cap
        return self.floor or 0.0

    @property
    def highest(self) -> float:
        """Return the upper bound of w: `cap`, else infinity."""
        return math.inf if self.cap is None else self.cap


class RatioRejection(Section):
    """Reject tokens, or whole responses, whose w is outside [low, high]."""

    kind: Literal["ratio"] = Field(description="Reject by w.")
    level: RatioLevel = Field(
        "token", description="Reject tokens by their w, or responses by product or geometric mean."
    )
    low: BelowOne = Field(description="Smaller w are rejected.")
    high: WeightCap = Field(description="Larger w are rejected.")


class DivergenceRejection(Section):
    """Reject tokens, or whole responses, with a large estimate of KL(rollout || old)."""

    kind: Literal["divergence"] = Field(description="Reject by an estimate of the KL.")
    estimator: Literal["k2", "k3"] = Field("k3", description="Of KL(rollout || old), from the sampled token.")
    level: DivergenceLevel = Field("token", description="Reject tokens, or responses by their sum, mean or maximum.")
    above: Positive = Field(description="Larger estimates are rejected, nats.")


class VetoRejection(Section):
    """Reject whole responses with a token that is far less likely for the trainer than for the sampler."""

    kind: Literal["veto"] = Field(description="Reject a response by its smallest w of a token.")
    below: Annotated[float, Field(gt=0, lt=1)] = Field(1e-4, description="A single w below this rejects the response.")


Rejection = Annotated[RatioRejection | DivergenceRejection | VetoRejection, Field(discriminator="kind")]


class GaeAdvantages(Section):
    """Generalized advantage estimation from the value model; lambda 0 is TD(0), 1 is Monte Carlo minus the value."""

    kind: Literal["gae"] = Field("gae", description="Estimate advantages per token with a value model.")
    gamma: Fraction = Field(1.0, description="Discount per token.")
    gae_lambda: Fraction = Field(0.95, description="GAE trace decay.")
    whiten: Whitening = Field("full", description="`full`: mean 0, variance 1; `scale`: variance 1, mean kept.")


class GroupAdvantages(Section):
    """GRPO, without `scale` Dr. GRPO: the score minus the mean score of the responses to its prompt; no value model."""

    kind: Literal["group"] = Field(description="Compare the responses to a prompt with each other.")
    scale: bool = Field(True, description="Divide by the group's standard deviation; false: only subtract its mean.")


class FunctionAdvantages(CheckedFunction):
    """A function of your own, called with all tokens of an iteration; it returns an advantage for each."""

    whiten: Whitening = Field("none", description="`full`: mean 0, variance 1; `scale`: variance 1, mean kept.")


AdvantagesConfig = Annotated[
    GaeAdvantages | GroupAdvantages | FunctionAdvantages, Field(discriminator="kind"), default_kind("kind", "gae")
]


class LoraConfig(Section):
    """Low-rank adapters instead of full weights; all forward passes use the merged weights. Hu et al., 2022."""

    rank: Count = Field(description="Rank r of the update.")
    alpha: Positive = Field(description="The update is scaled by alpha / r.")
    target_modules: Many[str] = Field((), description="Last names of the adapted linear layers; [] for all.")


class PredictedValue(Section):
    """Fields for training any value model."""

    clip_range: Positive | None = Field(0.2, description="Clip range around the old prediction; null: squared error.")
    normalize_returns: Annotated[bool, FIXED] = Field(
        False, description="Predict returns by running mean and standard deviation."
    )


class SeparateValue(PredictedValue):
    """A value model with a trunk and an optimizer of its own."""

    kind: Annotated[Literal["separate"], FIXED] = Field("separate", description="Train a value model of its own.")
    init: Annotated[Literal["policy", "reward_model"], FIXED] = Field("policy", description="What its trunk starts as.")
    learning_rate: NonNegative = Field(description="AdamW learning rate.")
    epochs: Count | None = Field(None, description="Passes over each rollout; null: as many as ppo.epochs.")
    lora: Annotated[LoraConfig | None, FIXED] = Field(
        None, description="Train its head and low-rank adapters; null: all weights."
    )


class ValueHead(PredictedValue):
    """A scalar head on the policy's trunk, trained in the same step."""

    kind: Annotated[Literal["head"], FIXED] = Field(description="Put the value on the policy's trunk.")
    value_coef: Positive = Field(0.1, description="Weight of the value loss beside the policy's.")


class NoValue(Section):
    """No value model: for group advantages."""

    kind: Annotated[Literal["none"], FIXED] = Field(description="Predict no values.")


ValueConfig = Annotated[
    SeparateValue | ValueHead | NoValue, Field(discriminator="kind"), default_kind("kind", "separate")
]


class FixedController(Section):
    """A constant kl_coef."""

    kind: Literal["fixed"] = Field("fixed", description="Keep kl_coef.")


class AdaptiveController(Section):
    """A kl_coef that follows KL(policy || reference) per response. Ziegler et al., 2019."""

    kind: Literal["adaptive"] = Field(description="Move kl_coef towards a wanted KL.")
    target_kl: Positive = Field(description="Wanted KL, summed over each response, mean over responses, nats.")
    horizon: Count = Field(
        10000, description="An iteration of n responses changes kl_coef by at most 20 % x min(1, n / horizon)."
    )


Controller = Annotated[FixedController | AdaptiveController, Field(discriminator="kind")]


class FunctionEstimator(CheckedFunction):
    """A function of your own that returns the KL of each token from the log-probs of policy and reference."""


AnyEstimator = Annotated[Annotated[KLEstimator, WORD] | Annotated[FunctionEstimator, FUNCTION], WORD_OR_FUNCTION]


class KLPlace(Section):
    """Where the KL is charged. The properties say which KL the loop must compute exactly."""

    @property
    def rewards_have_exact_reverse_kl(self) -> bool:
        """Return whether the rewards are charged KL(reference || policy) over the whole vocabulary."""
        return False

    @property
    def loss_has_exact_kl(self) -> bool:
        """Return whether the loss has a KL over the whole vocabulary, which takes the reference's logits in updates."""
        return False


class KLInReward(KLPlace):
    """KL(policy || reference), estimated before the update and subtracted from the rewards."""

    placement: Literal["reward"] = Field("reward", description="Charge the KL in the rewards.")
    kl_coef: NonNegative = Field(0.05, description="Weight of the penalty.")
    estimator: AnyEstimator = Field(
        "k1", description="From the sampled token, `exact` over the vocabulary, or your own."
    )
    direction: KLDirection = Field("policy_reference", description="KL(policy || reference), or the reverse.")
    charge: KLCharge = Field("token", description="On the token, on its word's end, by length, or on the last token.")
    controller: Controller = Field(FixedController(), description="How kl_coef moves between iterations.")

    @property
    def rewards_have_exact_reverse_kl(self) -> bool:
        return self.estimator == "exact" and self.direction == "reference_policy"

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.controller.kind == "adaptive" and not self.kl_coef:
            raise ValueError("controller.kind = adaptive needs a kl_coef above 0: it multiplies it")
        if isinstance(self.estimator, FunctionEstimator) and self.direction != "policy_reference":
            raise ValueError("direction = reference_policy is for the package's estimators; your function has its own")
        return self


class KLInLoss(KLPlace):
    """KL(policy || reference) as a term of the loss."""

    placement: Literal["loss"] = Field(description="Add the KL to the loss.")
    kl_coef: NonNegative = Field(0.05, description="Weight of the term.")
    estimator: AnyEstimator = Field("k3", description="Differentiated as written; k1 has no expected gradient.")

    @property
    def loss_has_exact_kl(self) -> bool:
        return self.estimator == "exact"


class NoKL(KLPlace):
    """No KL penalty; KL(policy || reference) is still recorded."""

    placement: Literal["none"] = Field(description="Charge no KL.")


KLConfig = Annotated[
    KLInReward | KLInLoss | NoKL, Field(discriminator="placement"), default_kind("placement", "reward")
]


class PPOConfig(Section):
    """The PPO update."""

    iterations: Count = Field(description="Rollout-update cycles.")
    epochs: Count = Field(description="Passes over each rollout.")
    minibatch_size: Count = Field(description="Sequences per optimizer step; divides the rollout.")
    ratio_anchor: Anchor = Field("rollout", description="The ratio is to the sampler's or the recomputed log-probs.")
    objective: Objective = Field(ClipObjective(), description="How ratios and advantages make a loss.")
    importance_weights: ImportanceWeights | None = Field(None, description="Against a sampler's mismatch; null: none.")
    rejection: Many[Rejection] = Field((), description="Tokens and responses that get weight 0; [] for none.")
    rejected_tokens: Literal["counted", "left_out"] = Field(
        "counted", description="A token of weight 0 stays in means and its other losses, or is left out of every loss."
    )
    replay_routes: bool = Field(False, description="Train with the experts that the sampler's routers chose.")
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = Field(
        "token_mean", description="Mean over a minibatch's tokens, or over its sequences of their means or sums."
    )
    early_stop_kl: Positive | None = Field(None, description="KL (k3), nats/token, that ends epochs; null: none.")
    entropy_coef: NonNegative = Field(0.0, description="Weight of the entropy bonus, nats.")
    learning_rate: NonNegative = Field(description="AdamW learning rate of the policy.")
    schedule: RateSchedule = Field("constant", description="How learning rates fall, to 0 after the last iteration.")
    warmup_iterations: Index = Field(0, description="Iterations over which learning rates rise at the start.")
    adam_beta2: BelowOne = Field(0.95, description="AdamW second-moment decay.")
    adam_eps: Positive = Field(1e-8, description="AdamW denominator offset.")
    weight_decay: NonNegative = Field(0.0, description="AdamW decoupled weight decay.")
    max_grad_norm: Positive = Field(1.0, description="Gradients are scaled down to this global norm.")

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        wrong = list(self._contradictions())
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    def _contradictions(self) -> Iterator[str]:
        if self.warmup_iterations >= self.iterations:
            yield f"warmup_iterations = {self.warmup_iterations} must be smaller than iterations = {self.iterations}"
        if self.importance_weights is not None and self.ratio_anchor != "old":
            yield "importance_weights needs ratio_anchor = old: with rollout the ratio corrects already"
        twice = [entry for index, entry in enumerate(self.rejection) if entry in self.rejection[:index]]
        if twice:
            yield f"rejection holds an entry of kind {twice[0].kind} twice; keep one"
        masks = self.importance_weights is not None and self.importance_weights.kind == "masked"
        if self.rejected_tokens == "left_out" and not (self.rejection or masks):
            yield "rejected_tokens = left_out needs rejection, or importance_weights of kind masked"
