"""The reward's part of a configuration: verifiers, functions, reward models, and where the score is put."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.section import Count, Finite, Many, NonNegative, PathText, Positive, Section, Whitening


class Term(Section):
    """One summand of the score."""

    weight: Finite = Field(1.0, description="Factor of this term in the score.")


class ExactMatch(Term):
    """1 if the response equals the answer and ended by itself, 0 otherwise."""

    kind: Literal["exact_match"] = Field("exact_match", description="Compare the response with the answer.")


class StepsReward(Term):
    """The share of the task's intermediate steps that a response has, each at its place; 1 if all are right."""

    kind: Literal["steps"] = Field(description="Compare the steps before the answer.")
    placement: Literal["score", "step_ends"] = Field(
        "score", description="As part of the score, or each step's part on the last token of the step."
    )


class FormatReward(Term):
    """1 for the form of R1, `<think>...</think><answer>...</answer>`, and 1 more if the answer is right."""

    kind: Literal["format"] = Field(description="Check the form, and the answer inside it.")


class LengthReward(Term):
    """-|tokens - target| / target: 0 at the wanted length."""

    kind: Literal["length"] = Field(description="Prefer responses of a wanted length.")
    target: Count = Field(description="Wanted length of a response, tokens, end token included.")


class FunctionReward(Term):
    """A function of the user's, called with prompt, response and answer."""

    kind: Literal["function"] = Field(description="Call a Python function.")
    path: PathText = Field(description="`FILE.py:FUNCTION`.")


class TrlReward(Term):
    """A function of TRL's `reward_funcs`, called with lists of one prompt and one completion, and extra columns."""

    kind: Literal["trl"] = Field(description="Call a reward function written for TRL.")
    path: PathText = Field(description="`FILE.py:FUNCTION`.")
    conversational: bool = Field(False, description="Give prompt and completion as chat messages instead of texts.")


class VerlReward(Term):
    """A `compute_score` of verl, called with data_source, solution_str, ground_truth and extra_info."""

    kind: Literal["verl"] = Field(description="Call a reward function written for verl.")
    path: PathText = Field(description="`FILE.py:FUNCTION`.")
    data_source: str = Field("", description="The data_source that the function is told.")


# the terms that name a function of the user's
CalledReward = FunctionReward | TrlReward | VerlReward


class Verifier(Term):
    """What the task's own verifier says: of reasoning-gym's data set, or `score` of a Python task."""

    kind: Literal["verifier"] = Field(description="Ask the verifier that the task brings.")


class RewardModelFolder(Term):
    """A transformers sequence classifier with one label, with the policy's tokenizer."""

    kind: Literal["model"] = Field(description="Load a reward model from a local folder.")
    path: PathText = Field(description="Folder with config.json and safetensors.")


LabelNoise = Annotated[float, Field(ge=0, lt=0.5)]


class RewardModelTraining(Section):
    """Pairs of a file, or made by a rule from the task, and the Bradley-Terry training of a reward model on them."""

    num_pairs: Count | None = Field(None, description="Preference pairs to make from training prompts.")
    pairs: PathText | None = Field(None, description="Lines with `prompt`, `chosen`, `rejected`; a tenth is held out.")
    label_noise: LabelNoise = Field(0.0, description="Probability that a training pair prefers the wrong answer.")
    epochs: Count = Field(1, description="Passes over the pairs.")
    minibatch_size: Count = Field(description="Pairs per optimizer step; the last step of an epoch may have fewer.")
    learning_rate: Positive = Field(description="AdamW learning rate.")

    @model_validator(mode="after")
    def _some_pairs(self) -> Self:
        if (self.num_pairs is None) == (self.pairs is None):
            raise ValueError("num_pairs, or pairs with a file, must be given, and not both")
        if self.pairs is not None and self.label_noise:
            raise ValueError("label_noise is for pairs made here; leave it out beside pairs")
        return self


class TrainedRewardModel(RewardModelTraining, Term):
    """A reward model made here before PPO: the policy's trunk, trained on pairs of a right and a wrong answer."""

    kind: Literal["trained_model"] = Field(description="Train a reward model here.")


RewardTerm = Annotated[
    ExactMatch
    | StepsReward
    | FormatReward
    | LengthReward
    | CalledReward
    | Verifier
    | RewardModelFolder
    | TrainedRewardModel,
    Field(discriminator="kind"),
]


class RewardConfig(Section):
    """What a response is worth, and on which of its tokens."""

    terms: Many[RewardTerm] = Field((ExactMatch(),), description="The score is the weighted sum of these.")
    placement: Literal["last", "word_ends"] = Field(
        "last", description="The score on the last token, or in equal parts at the ends of words."
    )
    missing_eos_penalty: NonNegative = Field(0.0, description="Subtracted from scores of responses cut at the limit.")
    whiten: Whitening = Field("none", description="Rewards with KL: `scale` to variance 1, `full` to mean 0 too.")

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if not self.terms:  # a smallest length would count a wrong entry as a second mistake
            raise ValueError("terms must hold at least one; leave the field out for exact_match")
        models = [t for t in self.terms if isinstance(t, RewardModelFolder | TrainedRewardModel)]
        if len(models) > 1:
            raise ValueError("terms may hold one reward model; keep one of kind model or trained_model")
        return self

    @property
    def model(self) -> RewardModelFolder | TrainedRewardModel | None:
        """The term that is a reward model, if there is one."""
        return next((t for t in self.terms if isinstance(t, RewardModelFolder | TrainedRewardModel)), None)
