"""Configure `task` and `reward`: prompts, and scores of responses."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.section import (
    FUNCTION,
    WORD,
    WORD_OR_FUNCTION,
    CheckedFunction,
    Count,
    Finite,
    Foreign,
    Many,
    NonNegative,
    PathText,
    Positive,
    Section,
    Whitening,
)

LabelNoise = Annotated[float, Field(ge=0, lt=0.5)]
AnswerExtraction = Literal["exact", "last_number", "answer_tags"]
Moment = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d)?)?$")]
PLACE = re.compile(r"\{(\w+)\}")  # of a field in a prompt template
# arguments that a template gets from the conversation or from this package, so that users cannot set them
NOT_ARGUMENTS = (
    "messages", "add_generation_prompt", "continue_final_message", "conversations", "chat_template",
    "return_assistant_tokens_mask", "strftime_now", "raise_exception",
)  # fmt: skip


class Term(Section):
    """A summand of the score."""

    value_range: ClassVar[tuple[float, float]] = (-math.inf, math.inf)  # before the weight

    weight: Finite = Field(1.0, description="Factor of this term in the score.")


class ExactMatch(Term):
    """1 if the response equals the answer and ends with an end token, 0 otherwise."""

    value_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    kind: Literal["exact_match"] = Field("exact_match", description="Compare the response with the answer.")


class StepsReward(Term):
    """The share of the task's intermediate steps that a response has, each in its position; 1 if all are right."""

    value_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    kind: Literal["steps"] = Field(description="Compare the steps before the answer.")
    placement: Literal["score", "step_ends"] = Field(
        "score", description="As part of the score, or each step's part on the last token of the step."
    )


class FormatReward(Term):
    """1 for R1's format `<think>...</think><answer>...</answer>`, and 1 more if the answer is right."""

    value_range: ClassVar[tuple[float, float]] = (0.0, 2.0)

    kind: Literal["format"] = Field(description="Check the form, and the answer inside it.")


class LengthReward(Term):
    """-|tokens - target| / target: 0 at the wanted length."""

    value_range: ClassVar[tuple[float, float]] = (-math.inf, 0.0)

    kind: Literal["length"] = Field(description="Prefer responses of a wanted length.")
    target: Count = Field(description="Wanted length of a response, tokens, end token included.")


class FunctionReward(Term):
    """A function of your own, called with the arguments that its parameters name."""

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


# terms that name a user's function
CalledReward = FunctionReward | TrlReward | VerlReward


class Verifier(Term):
    """The score of the task's own verifier: reasoning-gym's, or `score` of a Python task."""

    kind: Literal["verifier"] = Field(description="Ask the verifier that the task brings.")


class RewardModelFolder(Term):
    """A transformers sequence classifier with one label, with the policy's tokenizer."""

    kind: Literal["model"] = Field(description="Load a reward model from a local folder.")
    path: PathText = Field(description="Folder with config.json and safetensors.")


class RewardModelTraining(Section):
    """Bradley-Terry training of a reward model on the pairs of a file, or on pairs made by a rule from the task."""

    num_pairs: Count | None = Field(None, description="Preference pairs to make from training prompts.")
    pairs: PathText | None = Field(
        None, description="Lines or Parquet rows with `prompt`, `chosen`, `rejected`; a tenth is held out."
    )
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
    """A reward model trained before PPO: the policy's trunk, trained on pairs of a right and a wrong answer."""

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


class FunctionPlacement(CheckedFunction):
    """A function of your own that returns each token's reward, before the KL penalty, from the scores of responses."""


AnyPlacement = Annotated[
    Annotated[Literal["last", "word_ends"], WORD] | Annotated[FunctionPlacement, FUNCTION], WORD_OR_FUNCTION
]


class RewardConfig(Section):
    """The score of a response, and its placement on the response's tokens."""

    terms: Many[RewardTerm] = Field((ExactMatch(),), description="The score is the weighted sum of these.")
    placement: AnyPlacement = Field(
        "last", description="The score on the last token, in equal parts at the ends of words, or your own."
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
    def judges(self) -> bool:
        """Return whether responses are right or wrong; they are neither if a user's function is the only reward."""
        compared = any(isinstance(t, ExactMatch | FormatReward | Verifier) for t in self.terms)
        return compared or not any(isinstance(t, CalledReward) for t in self.terms)

    @property
    def score_range(self) -> tuple[float, float]:
        """Return the smallest and largest score that the terms can give; infinite if a term has no limit."""
        ends = [sorted(term.weight * end for end in term.value_range) for term in self.terms if term.weight]
        return sum((low for low, _ in ends), -self.missing_eos_penalty), sum((high for _, high in ends), 0.0)

    @property
    def model(self) -> RewardModelFolder | TrainedRewardModel | None:
        """Return the term that is a reward model; None if there is none."""
        return next((t for t in self.terms if isinstance(t, RewardModelFolder | TrainedRewardModel)), None)


class AnyTask(Section):
    """Fields of every task."""

    turns: ClassVar[int] = 1  # most turns of the model in an episode
    num_eval_prompts: Count = Field(description="Prompts held out of training and used for evaluation.")


class GeneratedTask(AnyTask):
    """Generated problems, for models that read plain text and answer in one turn."""

    # fixed here, but fields of a TextTask
    chat_template: ClassVar[bool] = False
    answer_extraction: ClassVar[AnswerExtraction] = "exact"


class ArithmeticTask(GeneratedTask):
    """Additions such as `47+38=`; the answer is verifiable and its length in tokens varies."""

    kind: Literal["arithmetic"] = Field(description="Generate the prompts here.")
    max_operand: Count = Field(description="Operands are drawn from 0 to this number, both included.")


class ColumnAdditionTask(GeneratedTask):
    """Additions worked out column by column: the answer to `47+38=` is `7+8=15 5 4+3+1=8 85`."""

    kind: Literal["column_addition"] = Field(description="Generate prompts and their intermediate steps here.")
    digits: Annotated[int, Field(ge=2, le=9)] = Field(description="Digits of each operand.")
    base: Annotated[int, Field(ge=2, le=10)] = Field(10, description="Base of the numbers; a smaller one is easier.")
    size: Annotated[int, Field(ge=2, le=1_000_000)] = Field(description="Prompts to draw, all different.")

    answer_extraction: ClassVar[AnswerExtraction] = "last_number"

    @model_validator(mode="after")
    def _enough_pairs(self) -> Self:
        pairs = ((self.base - 1) * self.base ** (self.digits - 1)) ** 2
        if self.size > pairs:
            raise ValueError(f"size = {self.size} must be at most {pairs}, the pairs of such numbers")
        return self


class Templated(Section):
    """Fields for rendering prompts."""

    chat_template: bool = Field(False, description="Render prompts with the tokenizer's chat template.")
    template_arguments: Foreign = Field(
        {}, description="What the template is given besides, such as enable_thinking or tools."
    )
    template_time: Moment | None = Field(
        None, description="What a template that asks for the time is told, as 2026-11-28T12:00; null: such a one fails."
    )

    @model_validator(mode="after")
    def _template_is_used(self) -> Self:
        for name in ("template_arguments", "template_time"):
            if getattr(self, name) and not self.chat_template:
                raise ValueError(f"{name} needs chat_template: true, whose template reads it")
        for name in self.template_arguments:
            if name in NOT_ARGUMENTS:
                raise ValueError(f"template_arguments.{name} is not for the user to choose; remove it")
        if self.template_time is not None:
            try:
                datetime.fromisoformat(self.template_time)
            except ValueError as error:
                raise ValueError(f"template_time = {self.template_time!r}: {error}") from None
        return self


class TextTask(AnyTask, Templated):
    """Fields of every task whose prompts come from a file, a library or a function."""

    system_prompt: str | None = Field(None, min_length=1, description="System turn of the template; null: none.")
    answer_extraction: AnswerExtraction = Field(
        "exact", description="What of a response is the answer: all, its last number, or the text in answer tags."
    )
    control_tokens: Literal["refuse", "allow"] = Field(
        "refuse", description="Whether the text of prompts and of an environment may hold special tokens."
    )
    overlong: Literal["fail", "drop"] = Field(
        "fail", description="What prompts do that leave too little of max_context: end the run, or be left out."
    )

    @model_validator(mode="after")
    def _system_prompt_has_a_template(self) -> Self:
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("system_prompt needs chat_template: true, which says where it belongs")
        return self


class JsonlTask(TextTask):
    """One JSON object per line, or one row of a Parquet file, with `prompt` and optionally `answer` and `key`."""

    kind: Literal["jsonl"] = Field(description="Read the prompts from a file.")
    path: PathText = Field(description="The JSON Lines file, or FILE.parquet.")
    eval_path: PathText | None = Field(
        None, description="File that the held-out prompts are drawn from; null: they are held out of path."
    )
    prompt_template: str | None = Field(
        None, description="The prompt, with {NAME} for the field NAME of a line; null: the field `prompt`."
    )

    @model_validator(mode="after")
    def _template_reads_a_field(self) -> Self:
        if self.prompt_template is not None and not PLACE.search(self.prompt_template):
            raise ValueError("prompt_template must have {NAME} for a field NAME of a line, such as {question}")
        return self


class ReasoningGymTask(TextTask):
    """A data set of reasoning-gym, whose own verifier gives the score. Stojanovski et al., 2025."""

    kind: Literal["reasoning_gym"] = Field(description="Generate the prompts with reasoning-gym, the extra [tasks].")
    dataset: Annotated[str, Field(min_length=1)] = Field(description="Name of the data set, such as chain_sum.")
    settings: Foreign = Field({}, description="Settings of the data set, `seed` too; {} for its own.")
    size: Count = Field(description="Entries to generate; a question that repeats counts once.")

    @model_validator(mode="after")
    def _fields_of_their_own(self) -> Self:
        if "size" in self.settings:
            raise ValueError("settings.size has a field of its own, task.size; give it there")
        seed = self.settings.get("seed", 0)
        if type(seed) is not int or seed < 0:
            raise ValueError(f"settings.seed = {seed!r} must be a whole number from 0")
        return self

    @property
    def data_seed(self) -> int:
        """Return the seed of the data set; the seed of the run does not change its prompts."""
        seed = self.settings.get("seed", 0)
        assert isinstance(seed, int)
        return seed


class PythonTask(TextTask):
    """A Python file with `prompts()`, `score(transcripts)` and, for several turns, `step(transcript)`."""

    kind: Literal["python"] = Field(description="Take the prompts, and their verifier, from a Python file.")
    path: PathText = Field(description="The Python file.")
    max_turns: Count = Field(1, description="Most turns of the model in an episode; above 1 the file needs `step`.")

    @property
    def turns(self) -> int:  # type: ignore[override] # other tasks have one
        return self.max_turns


TaskConfig = ArithmeticTask | ColumnAdditionTask | JsonlTask | ReasoningGymTask | PythonTask


def with_verifier_term(tree: Any) -> Any:
    """Add the verifier as the reward if the tree of a run gives no reward terms and its task has a verifier."""
    if not isinstance(tree, dict) or not isinstance(tree.get("task"), dict):
        return tree
    reward = tree.get("reward", {})
    if tree["task"].get("kind") not in ("reasoning_gym", "python") or not isinstance(reward, dict):
        return tree
    return {**tree, "reward": {"terms": [{"kind": "verifier"}], **reward}}
