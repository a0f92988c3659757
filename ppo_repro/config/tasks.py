"""The `task` section: where prompts come from, how they are put to the model, what of a response is the answer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from ppo_repro.config.section import Count, PathText, Section

AnswerExtraction = Literal["exact", "last_number", "answer_tags"]


class GeneratedTask(Section):
    """Problems made here, for models that read plain text and answer in one turn."""

    num_eval_prompts: Count = Field(description="Prompts held out of training and used for evaluation.")

    chat_template: ClassVar[bool] = False
    system_prompt: ClassVar[str | None] = None
    answer_extraction: ClassVar[AnswerExtraction] = "exact"
    control_tokens: ClassVar[str] = "refuse"
    turns: ClassVar[int] = 1


class ArithmeticTask(GeneratedTask):
    """Additions such as `47+38=`; the answer is verifiable and its length in tokens varies."""

    kind: Literal["arithmetic"] = Field(description="Generate the prompts here.")
    max_operand: Count = Field(description="Operands are drawn from 0 to this number, both included.")


class ColumnAdditionTask(GeneratedTask):
    """Additions worked out column by column: `47+38=` is answered by `7+8=15 5 4+3+1=8 85`."""

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


class TextTask(Section):
    """What every task of somebody else's prompts has."""

    turns: ClassVar[int] = 1
    num_eval_prompts: Count = Field(description="Prompts held out of training and used for evaluation.")
    chat_template: bool = Field(False, description="Render each prompt as a user's turn of the chat template.")
    system_prompt: str | None = Field(None, min_length=1, description="System turn of the template; null: none.")
    answer_extraction: AnswerExtraction = Field(
        "exact",
        description="What of a response is the answer: all of it, its last number, or the text in answer tags.",
    )
    control_tokens: Literal["refuse", "allow"] = Field(
        "refuse", description="Whether the text of prompts and of an environment may hold special tokens."
    )

    @model_validator(mode="after")
    def _system_prompt_has_a_template(self) -> Self:
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("system_prompt needs chat_template: true, which says where it belongs")
        return self


class JsonlTask(TextTask):
    """One JSON object per line with `prompt` and optionally `answer` and `key`."""

    kind: Literal["jsonl"] = Field(description="Read the prompts from a file.")
    path: PathText = Field(description="The JSON Lines file.")


class ReasoningGymTask(TextTask):
    """A data set of reasoning-gym, whose own verifier gives the score. Stojanovski et al., 2025."""

    kind: Literal["reasoning_gym"] = Field(description="Generate the prompts with reasoning-gym, the extra [tasks].")
    dataset: Annotated[str, Field(min_length=1)] = Field(description="Name of the data set, such as chain_sum.")
    settings: dict[str, JsonValue] = Field({}, description="Settings of the data set, `seed` too; {} for its own.")
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
        """Seed of the data set; the seed of the run does not change its prompts."""
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


def with_usual_terms(tree: Any) -> Any:
    """The tree of a run in which a task with a verifier of its own is judged by it, where no terms are given."""
    if not isinstance(tree, dict) or not isinstance(tree.get("task"), dict):
        return tree
    reward = tree.get("reward", {})
    if tree["task"].get("kind") not in ("reasoning_gym", "python") or not isinstance(reward, dict):
        return tree
    return {**tree, "reward": {"terms": [{"kind": "verifier"}], **reward}}
