"""What ends a turn of the model, and the environment's turns as tokens that are put in once and never made again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from ppo_repro.errors import UserError
from ppo_repro.output import shown
from ppo_repro.rollout.engine import Completion
from ppo_repro.tasks.problems import Problem, rendered
from ppo_repro.tasks.python_task import PythonFile, take_step
from ppo_repro.tasks.tokenizer import decode
from ppo_repro.tasks.transcripts import make_transcript

_MARK = "ppo7repro7mark"  # stands for the model's turn while a chat template is taken apart


def around_reply(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What a chat template has between the model's turn and a user's, and from there to the model's next turn.

    UserError where the template does not put the turns one after the other.
    """
    text = rendered(
        tokenizer,
        [
            {"role": "user", "content": "a question"},
            {"role": "assistant", "content": _MARK + "1"},
            {"role": "user", "content": _MARK + "2"},
        ],
    )
    _, first, rest = text.partition(_MARK + "1")
    before, second, after = rest.partition(_MARK + "2")
    if not first or not second:
        raise UserError("task.chat_template: the tokenizer's template leaves turns out; set it to false")
    return before, after


class Conversations:
    """The environment's side of some requests. `said` is all it has said to each of them, by index."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        environment: PythonFile | None,
        problems: Sequence[Problem],
        max_turns: int,
        max_response_tokens: int,
        chat_template: bool,
    ) -> None:
        self.tokenizer, self.stop, self.environment, self.problems = tokenizer, tuple(stop), environment, problems
        self.max_turns, self.max_response_tokens = max_turns, max_response_tokens
        self._around = around_reply(tokenizer) if chat_template and environment is not None else ("", "")
        self.said: dict[int, list[str]] = {}

    def ends(self, turn: Sequence[int]) -> bool:
        """Whether the text of a turn has one of the stop texts."""
        text = decode(self.tokenizer, turn) if self.stop else ""
        return any(stop in text for stop in self.stop)

    def reply(self, index: int, turns: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """The tokens of what `step` says; UserError where it raises, goes on for too long, or says too much."""
        if self.environment is None:
            return None
        problem, said = self.problems[index], self.said.setdefault(index, [])
        spoken = [decode(self.tokenizer, turn) for turn in turns]
        texts = [text for pair in zip(spoken, [*said, ""], strict=True) for text in pair][:-1]
        transcript = make_transcript(problem.key, problem.prompt, problem.answer, problem.fields, texts)
        text = take_step(self.environment, transcript)
        if text is None:
            return None
        assert self.environment.step is not None
        where = self.environment.where(None, self.environment.step)
        if len(turns) == self.max_turns:
            raise UserError(
                f"task.max_turns = {self.max_turns}: {where.removeprefix('task.path: ')}: step wants another turn for "
                f"prompt key '{shown(problem.key)}'; let it return None by then, or raise the limit"
            )
        said.append(text)
        ids = self._tokens(text, turns[-1][-1])
        if len(ids) >= self.max_response_tokens:
            raise UserError(
                f"{where}: step returned a text of {len(ids)} tokens for prompt key '{shown(problem.key)}', which "
                f"leaves no room in rollout.max_response_tokens = {self.max_response_tokens}; return less, or raise it"
            )
        if not ids:
            raise UserError(f"{where}: step returned {text!r}, which has no tokens; return None to end it")
        return ids

    def _tokens(self, text: str, last: int) -> tuple[int, ...]:
        """A text as the template puts it; what ends the model's turn is left out where the model has sampled it."""
        before, after = self._around
        ids = tuple(self.tokenizer(f"{before}{text}{after}", add_special_tokens=False)["input_ids"])
        return ids[1:] if before and ids[:1] == (last,) else ids

    def turns_of(self, index: int, completion: Completion) -> tuple[str, ...]:
        """The texts of all turns of a completion, the model's first."""
        pairs = zip(completion.episode_ids, completion.is_forced, strict=True)
        pieces = [(forced, [token for token, _ in group]) for forced, group in groupby(pairs, key=lambda pair: pair[1])]
        said = iter(self.said.get(index, ()))
        return tuple(next(said) if forced else decode(self.tokenizer, ids) for forced, ids in pieces)
