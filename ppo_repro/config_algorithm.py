"""The algorithm's part of a configuration: objective, advantages, value model, KL, reward, optimizers.

Where methods differ in their fields, `kind` chooses one, so that no field is without effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config_section import Count, Finite, Fraction, Index, NonNegative, Positive, Section, with_usual

ClipBound = Annotated[float, Field(gt=0, lt=1)]
Whitening = Literal["none", "scale", "full"]


class ClipObjective(Section):
    """The clipped surrogate of PPO, with clip-higher and dual clip."""

    kind: Literal["clip"] = "clip"
    clip_range: ClipBound = Field(0.2, description="Ratios below 1 - clip_range are not pushed further down.")
    clip_range_high: Positive | None = Field(
        None, description="Ratios above 1 + clip_range_high are not pushed further up; null: the same as clip_range."
    )
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        None, description="Ratios above this keep no gradient where the advantage is negative; null: no dual clip."
    )

    @model_validator(mode="after")
    def _dual_is_outside(self) -> Self:
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        if self.dual_clip is not None and self.dual_clip <= 1.0 + high:
            raise ValueError(f"dual_clip = {self.dual_clip} must be greater than 1 + the upper clip range {high}")
        return self


class AdaptiveClipObjective(Section):
    """The clipped surrogate with a clip range that follows KL(anchor || new)."""

    kind: Literal["adaptive_clip"]
    clip_range: ClipBound = Field(0.2, description="Clip range of the first iteration, on both sides.")
    target_kl: Positive = Field(description="Halve above 1.5 times this, double below it / 1.5; nats per token.")
    clip_range_min: ClipBound = Field(0.02, description="The clip range is never smaller.")
    clip_range_max: ClipBound = Field(0.5, description="The clip range is never larger.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.clip_range_min <= self.clip_range <= self.clip_range_max:
            raise ValueError(
                f"clip_range = {self.clip_range} must lie between clip_range_min and clip_range_max, "
                f"{self.clip_range_min} and {self.clip_range_max}"
            )
        return self


class PenaltyObjective(Section):
    """PPO-Penalty: the unclipped surrogate minus beta KL(anchor || new)."""

    kind: Literal["kl_penalty"]
    penalty_coef: Positive = Field(1.0, description="beta of the first iteration.")
    target_kl: Positive | None = Field(
        None, description="Halve beta below this / 1.5, double it above 1.5 times this; nats per token; null: fixed."
    )


class UnclippedObjective(Section):
    """The importance-sampled surrogate without any bound, L_CPI."""

    kind: Literal["unclipped"]


class PolicyGradientObjective(Section):
    """REINFORCE with a baseline: log pi times advantage, no ratio."""

    kind: Literal["policy_gradient"]


Objective = Annotated[
    ClipObjective | AdaptiveClipObjective | PenaltyObjective | UnclippedObjective | PolicyGradientObjective,
    Field(discriminator="kind"),
]


class ImportanceWeights(Section):
    """Correction of a sampler that is not the policy that is trained: pi_old / pi_rollout on every token's loss."""

    kind: Literal["truncated", "masked"] = Field(description="min(w, cap), or 0 where w is outside [1/cap, cap].")
    level: Literal["token", "sequence"] = Field("token", description="w of the token, or of its whole response.")
    cap: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(2.0, description="Largest weight.")


class GaeAdvantages(Section):
    """Generalized advantage estimation from the value model; 0 is TD(0), 1 is Monte Carlo minus the value."""

    kind: Literal["gae"] = "gae"
    gamma: Fraction = Field(1.0, description="Discount per token.")
    gae_lambda: Fraction = Field(0.95, description="GAE trace decay.")
    truncation: Literal["terminal", "bootstrap"] = Field(
        "terminal",
        description="After a response cut at the length limit: nothing follows, or the value model's estimate.",
    )
    whiten: Whitening = Field("full", description="`full`: mean 0, variance 1; `scale`: variance 1, mean kept.")


class GroupAdvantages(Section):
    """GRPO: the score relative to the other responses to the same prompt. Needs no value model."""

    kind: Literal["group"]
    scale: bool = Field(True, description="Divide by the group's standard deviation; false is Dr. GRPO.")


AdvantagesConfig = Annotated[GaeAdvantages | GroupAdvantages, Field(discriminator="kind")]


class SeparateValue(Section):
    """A value model with a trunk and an optimizer of its own."""

    kind: Literal["separate"] = "separate"
    init: Literal["policy", "reward_model"] = Field("policy", description="What its trunk starts as.")
    learning_rate: NonNegative = Field(description="AdamW learning rate.")
    epochs: Count | None = Field(None, description="Passes over each rollout; null: as many as ppo.epochs.")
    clip_range: Positive | None = Field(
        0.2, description="Clip range of the value around its old prediction; null: plain squared error."
    )
    normalize_returns: bool = Field(
        False, description="Predict returns in units of their running mean and standard deviation."
    )


class ValueHead(Section):
    """A scalar head on the policy's trunk, trained in the same step."""

    kind: Literal["head"]
    value_coef: Positive = Field(0.1, description="Weight of the value loss beside the policy's.")
    clip_range: Positive | None = Field(
        0.2, description="Clip range of the value around its old prediction; null: plain squared error."
    )
    normalize_returns: bool = Field(
        False, description="Predict returns in units of their running mean and standard deviation."
    )


class NoValue(Section):
    """No value model: for group advantages."""

    kind: Literal["none"]


ValueConfig = Annotated[SeparateValue | ValueHead | NoValue, Field(discriminator="kind")]


class FixedController(Section):
    """kl_coef stays."""

    kind: Literal["fixed"] = "fixed"


class AdaptiveController(Section):
    """kl_coef follows KL(policy || reference) per response. Ziegler et al., 2019."""

    kind: Literal["adaptive"]
    target_kl: Positive = Field(description="Wanted KL, summed over each response, mean over responses, nats.")
    horizon: Count = Field(10000, description="Responses over which kl_coef may change by 20 % at most.")


Controller = Annotated[FixedController | AdaptiveController, Field(discriminator="kind")]


class KLInReward(Section):
    """KL between policy and reference, estimated before the update and subtracted from the rewards."""

    placement: Literal["reward"] = "reward"
    kl_coef: NonNegative = Field(0.05, description="Weight of the penalty.")
    estimator: Literal["k1", "k2", "k3", "exact"] = Field(
        "k1", description="From the sampled token, or `exact` over the whole distribution at its position."
    )
    direction: Literal["policy_reference", "reference_policy"] = Field(
        "policy_reference", description="KL(policy || reference) or KL(reference || policy)."
    )
    charge: Literal["token", "word", "length_normalized", "last_sum", "last_mean"] = Field(
        "token", description="Every token its own; a word on its last token; token / length; all on the last token."
    )
    controller: Controller = Field(FixedController(), description="How kl_coef moves between iterations.")


class KLInLoss(Section):
    """KL(policy || reference) as a term of the loss."""

    placement: Literal["loss"]
    kl_coef: NonNegative = Field(0.05, description="Weight of the term.")
    estimator: Literal["k1", "k2", "k3", "exact"] = Field(
        "k3", description="Differentiated as written; k1 has no expected gradient; `exact` is over the vocabulary."
    )
    controller: Controller = Field(FixedController(), description="How kl_coef moves between iterations.")


class NoKL(Section):
    """No KL penalty; the divergence is recorded all the same."""

    placement: Literal["none"]


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
    importance_weights: ImportanceWeights | None = Field(
        None, description="Weights against a sampler that differs from the policy; null: none."
    )
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = Field(
        "token_mean",
        description="Mean over the tokens of a minibatch; mean over its sequences of their means, or of their sums.",
    )
    early_stop_kl: Positive | None = Field(
        None,
        description="After a minibatch with more KL(anchor || new), k3, nats per token, the policy rests; null: never.",
    )
    entropy_coef: NonNegative = Field(0.0, description="Weight of the entropy bonus, nats.")
    learning_rate: NonNegative = Field(description="AdamW learning rate of the policy.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How learning rates fall, to 0 after the last iteration."
    )
    warmup_iterations: Index = Field(0, description="Iterations over which learning rates rise at the start.")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW first-moment decay.")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="AdamW second-moment decay.")
    adam_eps: Positive = Field(1e-8, description="AdamW denominator offset.")
    weight_decay: NonNegative = Field(0.0, description="AdamW decoupled weight decay.")
    max_grad_norm: Positive = Field(1.0, description="Gradients are scaled down to this global norm.")

    @model_validator(mode="before")
    @classmethod
    def _usual_objective(cls, tree: Any) -> Any:
        return with_usual(tree, (("objective", "kind", "clip"),))


class ExactMatch(Section):
    """1 if the response equals the answer and ended by itself, 0 otherwise."""

    kind: Literal["exact_match"] = "exact_match"
    weight: Finite = Field(1.0, description="Factor of this term in the score.")


class FormatReward(Section):
    """Format and answer in the manner of R1: `<think>...</think><answer>...</answer>`."""

    kind: Literal["format"]
    weight: Finite = Field(1.0, description="Factor of this term in the score.")
    answer_weight: Finite = Field(
        1.0, description="1 for the form plus this much if the text between the answer tags is the answer."
    )


class LengthReward(Section):
    """-|tokens - target| / target: 0 at the wanted length."""

    kind: Literal["length"]
    weight: Finite = Field(1.0, description="Factor of this term in the score.")
    target: Count = Field(description="Wanted length of a response, tokens, end token included.")


class FunctionReward(Section):
    """A function of the user's, called with prompt, response and answer."""

    kind: Literal["function"]
    weight: Finite = Field(1.0, description="Factor of this term in the score.")
    path: str = Field(min_length=1, description="`FILE.py:FUNCTION`.")


class RewardModelFolder(Section):
    """A transformers sequence classifier with one label, with the policy's tokenizer."""

    kind: Literal["model"]
    weight: Finite = Field(1.0, description="Factor of this term in the score.")
    path: str = Field(min_length=1, description="Folder with config.json and safetensors.")


class RewardModelTraining(Section):
    """Pairs made by a rule from the task, and the Bradley-Terry training of a reward model on them."""

    num_pairs: Count = Field(description="Preference pairs to train on, made from training prompts.")
    num_eval_pairs: Count = Field(256, description="Pairs from held-out prompts, without label noise, to judge it by.")
    label_noise: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Probability that a training pair prefers the wrong answer."
    )
    epochs: Count = Field(1, description="Passes over the pairs.")
    minibatch_size: Count = Field(description="Pairs per optimizer step; the last step of an epoch may have fewer.")
    learning_rate: Positive = Field(description="AdamW learning rate.")


class TrainedRewardModel(RewardModelTraining):
    """A reward model made here before PPO: the policy's trunk, trained on pairs of a right and a wrong answer."""

    kind: Literal["trained_model"]
    weight: Finite = Field(1.0, description="Factor of this term in the score.")


RewardTerm = Annotated[
    ExactMatch | FormatReward | LengthReward | FunctionReward | RewardModelFolder | TrainedRewardModel,
    Field(discriminator="kind"),
]


class RewardConfig(Section):
    """What a response is worth, and on which of its tokens."""

    terms: Annotated[tuple[RewardTerm, ...], Field(min_length=1, strict=False)] = Field(
        (ExactMatch(),), description="The score is the weighted sum of these."
    )
    placement: Literal["last", "word_ends", "uniform"] = Field(
        "last", description="The score on the last token, in equal parts at the ends of words, or on every token."
    )
    potential: str | None = Field(
        None, description="`FILE.py:FUNCTION` of prompt, response so far, answer: potential-based shaping; null: none."
    )
    missing_eos_penalty: NonNegative = Field(0.0, description="Subtracted from scores of responses cut at the limit.")
    missing_eos_score: Finite | None = Field(None, description="Score of responses cut at the limit; null: their own.")
    whiten: Whitening = Field(
        "none", description="Per-token rewards, KL penalty included: `scale` to variance 1, `full` also to mean 0."
    )

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if self.missing_eos_score is not None and self.missing_eos_penalty:
            raise ValueError("missing_eos_penalty and missing_eos_score cannot both be given; keep one")
        models = [t for t in self.terms if isinstance(t, RewardModelFolder | TrainedRewardModel)]
        if len(models) > 1:
            raise ValueError("terms may hold one reward model; keep one of kind model or trained_model")
        return self

    @property
    def model(self) -> RewardModelFolder | TrainedRewardModel | None:
        """The term that is a reward model, if there is one."""
        return next((t for t in self.terms if isinstance(t, RewardModelFolder | TrainedRewardModel)), None)


class LoraConfig(Section):
    """Low-rank adapters instead of full weights; all forward passes use the merged weights. Hu et al., 2021."""

    rank: Count = Field(description="Rank r of the update.")
    alpha: Positive = Field(description="The update is scaled by alpha / r.")
    target_modules: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="Last names of the linear layers that get one; [] for all of attention and MLP."
    )
