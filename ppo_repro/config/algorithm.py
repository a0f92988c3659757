"""The algorithm's part of a configuration: objective, advantages, value model, KL, reward, optimizers.

Where methods differ in their fields, `kind` chooses one, so that no field is without effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.objectives import ClipObjective, ImportanceWeights, Objective, Rejection
from ppo_repro.config.section import (
    BelowOne,
    Count,
    Fraction,
    Index,
    Many,
    NonNegative,
    Positive,
    Schedule,
    Section,
    Whitening,
    with_usual,
)


class GaeAdvantages(Section):
    """Generalized advantage estimation from the value model; 0 is TD(0), 1 is Monte Carlo minus the value."""

    kind: Literal["gae"] = Field("gae", description="Estimate advantages per token with a value model.")
    gamma: Fraction = Field(1.0, description="Discount per token.")
    gae_lambda: Fraction = Field(0.95, description="GAE trace decay.")
    whiten: Whitening = Field("full", description="`full`: mean 0, variance 1; `scale`: variance 1, mean kept.")


class GroupAdvantages(Section):
    """GRPO, without `scale` Dr. GRPO: the score relative to the other responses to its prompt. No value model."""

    kind: Literal["group"] = Field(description="Compare the responses to a prompt with each other.")
    scale: bool = Field(True, description="Divide by the group's standard deviation; false: only subtract its mean.")


AdvantagesConfig = Annotated[GaeAdvantages | GroupAdvantages, Field(discriminator="kind")]


class ExpertsConfig(Section):
    """A router and its experts in place of every MLP."""

    family: Literal["qwen3_moe", "mixtral", "olmoe"] = Field(description="Which transformers class the policy has.")
    count: Annotated[int, Field(ge=2, le=1024)] = Field(description="Experts in each layer, each of intermediate_size.")
    per_token: Count = Field(description="Experts that compute a token; at most count.")

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.per_token > self.count:
            raise ValueError(f"per_token = {self.per_token} must be at most count = {self.count}")
        return self


class LoraConfig(Section):
    """Low-rank adapters instead of full weights; all forward passes use the merged weights. Hu et al., 2021."""

    rank: Count = Field(description="Rank r of the update.")
    alpha: Positive = Field(description="The update is scaled by alpha / r.")
    target_modules: Many[str] = Field((), description="Last names of the adapted linear layers; [] for all.")


class PredictedValue(Section):
    """How any value model is trained."""

    clip_range: Positive | None = Field(0.2, description="Clip range around the old prediction; null: squared error.")
    normalize_returns: bool = Field(False, description="Predict returns by running mean and standard deviation.")


class SeparateValue(PredictedValue):
    """A value model with a trunk and an optimizer of its own."""

    kind: Literal["separate"] = Field("separate", description="Train a value model of its own.")
    init: Literal["policy", "reward_model"] = Field("policy", description="What its trunk starts as.")
    learning_rate: NonNegative = Field(description="AdamW learning rate.")
    epochs: Count | None = Field(None, description="Passes over each rollout; null: as many as ppo.epochs.")
    lora: LoraConfig | None = Field(None, description="Train its head and low-rank adapters; null: all weights.")


class ValueHead(PredictedValue):
    """A scalar head on the policy's trunk, trained in the same step."""

    kind: Literal["head"] = Field(description="Put the value on the policy's trunk.")
    value_coef: Positive = Field(0.1, description="Weight of the value loss beside the policy's.")


class NoValue(Section):
    """No value model: for group advantages."""

    kind: Literal["none"] = Field(description="Predict no values.")


ValueConfig = Annotated[SeparateValue | ValueHead | NoValue, Field(discriminator="kind")]


class FixedController(Section):
    """kl_coef stays."""

    kind: Literal["fixed"] = Field("fixed", description="Keep kl_coef.")


class AdaptiveController(Section):
    """kl_coef follows KL(policy || reference) per response. Ziegler et al., 2019."""

    kind: Literal["adaptive"] = Field(description="Move kl_coef towards a wanted KL.")
    target_kl: Positive = Field(description="Wanted KL, summed over each response, mean over responses, nats.")
    horizon: Count = Field(10000, description="Responses over which kl_coef may change by 20 % at most.")


Controller = Annotated[FixedController | AdaptiveController, Field(discriminator="kind")]


KLDirection = Literal["policy_reference", "reference_policy"]
KLCharge = Literal["token", "word", "length_normalized", "last_sum", "last_mean"]


class KLInReward(Section):
    """KL between policy and reference, estimated before the update and subtracted from the rewards."""

    placement: Literal["reward"] = Field("reward", description="Charge the KL in the rewards.")
    kl_coef: NonNegative = Field(0.05, description="Weight of the penalty.")
    estimator: Literal["k1", "k2", "k3", "exact"] = Field(
        "k1", description="From the sampled token, or `exact` over the whole distribution at its position."
    )
    direction: KLDirection = Field("policy_reference", description="KL(policy || reference), or the reverse.")
    charge: KLCharge = Field("token", description="On the token, on its word's end, by length, or on the last token.")
    controller: Controller = Field(FixedController(), description="How kl_coef moves between iterations.")


class KLInLoss(Section):
    """KL(policy || reference) as a term of the loss."""

    placement: Literal["loss"] = Field(description="Add the KL to the loss.")
    kl_coef: NonNegative = Field(0.05, description="Weight of the term.")
    estimator: Literal["k1", "k2", "k3", "exact"] = Field(
        "k3", description="Differentiated as written; k1 has no expected gradient; `exact` is over the vocabulary."
    )


class NoKL(Section):
    """No KL penalty; the divergence is recorded all the same."""

    placement: Literal["none"] = Field(description="Charge no KL.")


KLConfig = Annotated[KLInReward | KLInLoss | NoKL, Field(discriminator="placement")]


class PPOConfig(Section):
    """The PPO update."""

    iterations: Count = Field(description="Rollout-update cycles.")
    epochs: Count = Field(description="Passes over each rollout.")
    minibatch_size: Count = Field(description="Sequences per optimizer step; divides the rollout.")
    ratio_anchor: Literal["rollout", "old"] = Field(
        "rollout", description="Denominator of the ratio: the sampler's log-probs or the recomputed ones."
    )
    objective: Objective = Field(ClipObjective(), description="What is maximised.")
    importance_weights: ImportanceWeights | None = Field(None, description="Against a sampler's mismatch; null: none.")
    rejection: Many[Rejection] = Field((), description="Tokens and responses that get weight 0; [] for none.")
    rejected_tokens: Literal["counted", "left_out"] = Field(
        "counted", description="A token of weight 0 stays in means and its other losses, or is left out of every loss."
    )
    replay_routes: bool = Field(False, description="Train with the experts that the sampler's routers chose.")
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = Field(
        "token_mean",
        description="Mean over the tokens of a minibatch; mean over its sequences of their means, or of their sums.",
    )
    early_stop_kl: Positive | None = Field(
        None, description="KL (k3), nats/token, that ends the policy's epochs; null: none."
    )
    entropy_coef: NonNegative = Field(0.0, description="Weight of the entropy bonus, nats.")
    learning_rate: NonNegative = Field(description="AdamW learning rate of the policy.")
    schedule: Schedule = Field("constant", description="How learning rates fall, to 0 after the last iteration.")
    warmup_iterations: Index = Field(0, description="Iterations over which learning rates rise at the start.")
    adam_beta2: BelowOne = Field(0.95, description="AdamW second-moment decay.")
    adam_eps: Positive = Field(1e-8, description="AdamW denominator offset.")
    weight_decay: NonNegative = Field(0.0, description="AdamW decoupled weight decay.")
    max_grad_norm: Positive = Field(1.0, description="Gradients are scaled down to this global norm.")

    @model_validator(mode="after")
    def _rejects_something_once(self) -> Self:
        twice = [entry for index, entry in enumerate(self.rejection) if entry in self.rejection[:index]]
        if twice:
            raise ValueError(f"rejection holds an entry of kind {twice[0].kind} twice; keep one")
        masks = self.importance_weights is not None and self.importance_weights.kind == "masked"
        if self.rejected_tokens == "left_out" and not (self.rejection or masks):
            raise ValueError("rejected_tokens = left_out needs rejection, or importance_weights of kind masked")
        return self

    @model_validator(mode="before")
    @classmethod
    def _usual_objective(cls, tree: Any) -> Any:
        return with_usual(tree, (("objective", "kind", "clip"),))
