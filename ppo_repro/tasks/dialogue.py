"""Episodes of several turns: the end of a model's turn, and the environment's turns, which are encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from transformers import PreTrainedTokenizerBase

from ppo_repro.base.errors import FunctionFailed, UserError
from ppo_repro.base.output import say, shown
from ppo_repro.config.tasks import TaskConfig
from ppo_repro.sampler import Completion
from ppo_repro.tasks.problems import FIELD, Problem, row_of
from ppo_repro.tasks.templates import chat_of, control_tokens_of, rendered_for
from ppo_repro.tasks.tokenizer import decode, full_text, token_ids
from ppo_repro.user.process import UserFunction

END = 16  # tokens, and characters before a stop text: the first ones may be decoded otherwise than inside the turn
_MARK = "ppo7repro7mark"  # stands for the model's turn while a chat template is taken apart


def around_reply(task: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return a chat template's text before and after a user's turn, between two turns of the model.

    Raises UserError if the template does not join the turns in their order.
    """
    chat = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": _MARK + "1"},
        {"role": "user", "content": _MARK + "2"},
    ]
    (text,) = rendered_for(task, tokenizer, [chat])
    _, first, rest = text.partition(_MARK + "1")
    before, second, after = rest.partition(_MARK + "2")
    if not first or not second:
        raise UserError("task.chat_template: the tokenizer's template leaves turns out; set it to false")
    return before, after


@dataclass(eq=False)
class Environment:
    """What ends and answers the model's turns in a run. It warns once about a template, for all of the run."""

    task: TaskConfig
    stop: Sequence[str]  # texts that end a turn of the model
    max_response_tokens: int  # of an episode after its prompt
    tokenizer: PreTrainedTokenizerBase
    spelled: frozenset[int]  # special tokens that decoded texts show
    step: UserFunction | None  # the user's environment; None: an episode has one turn

    def __post_init__(self) -> None:
        self.has_template = self.task.chat_template and self.step is not None
        self.around = around_reply(self.task, self.tokenizer) if self.has_template else ("", "")
        self.refuse = control_tokens_of(self.tokenizer, self.task)
        self.has_warned = False


class Conversation:
    """The environment's turns in one episode."""

    def __init__(self, environment: Environment, problem: Problem) -> None:
        """Begin the episode of a prompt."""
        self.environment, self.problem = environment, problem
        self._said: list[str] = []  # the environment's texts
        self._put: list[tuple[int, ...]] = []  # and their tokens

    def ends(self, turn: Sequence[int]) -> bool:
        """Return whether the last token of a turn completes a stop text.

        Only the end of the turn is decoded, because every token of a turn asks.
        """
        stop, count = self.environment.stop, END
        needed = max(map(len, stop), default=0) + END
        while stop and count < len(turn) and len(self._decoded(turn[-count:-1])) < needed:
            count *= 2
        text = self._decoded(turn[-count:]) if stop else ""
        for more in range(1, 4):  # tokens of bytes: an end that begins inside of a character may decode to no text
            if text.startswith("\ufffd"):
                text = self._decoded(turn[-count - more :])
        return any(ending in text for ending in stop)

    def reply(self, turns: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """Call `step` and encode its text; None if the episode ends.

        Raises FunctionFailed if `step` fails or has no room.
        """
        try:
            return self._reply(turns)
        except UserError as error:
            raise FunctionFailed(str(error), FIELD) from error

    def _reply(self, turns: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        environment, step = self.environment, self.environment.step
        if step is None:
            return None
        where, of_prompt = step.where, f"prompt key '{shown(self.problem.key)}'"
        spoken = [self._decoded(turn) for turn in turns]
        # model and environment alternate; the model has the first and the last turn
        texts = [text for pair in zip(spoken, [*self._said, ""], strict=True) for text in pair][:-1]
        (text,) = step([row_of(self.problem, texts)])
        if text is None:
            return None
        task, longest = environment.task, environment.max_response_tokens
        if len(turns) == task.turns:
            raise UserError(
                f"task.max_turns = {task.turns}: {where.removeprefix('task.path: ')}: step wants another turn for "
                f"{of_prompt}; let it return None by then, or raise the limit"
            )
        environment.refuse(f"{where}: step returned a text for {of_prompt} that", text)
        self._said.append(text)
        before, after = environment.around
        ids = token_ids(environment.tokenizer, f"{before}{text}{after}", add_special_tokens=False)
        if before and ids[:1] == (turns[-1][-1],):  # the token that ends the model's turn, if the model has sampled it
            ids = ids[1:]
        if len(ids) >= longest:
            raise UserError(
                f"{where}: step returned a text of {len(ids)} tokens for {of_prompt}, which "
                f"leaves no room in rollout.max_response_tokens = {longest}; return less, or raise it"
            )
        if not ids:
            raise UserError(f"{where}: step returned {text!r}, which has no tokens; return None to end it")
        self._put.append(ids)
        if environment.has_template and not environment.has_warned:
            episode = [token for pair in zip(turns, self._put, strict=True) for ids_ in pair for token in ids_]
            self._compare(episode, [*texts, text])
        return ids

    def _compare(self, episode: Sequence[int], texts: Sequence[str]) -> None:
        """Warn once, with both texts, if the template renders the turns so far differently from the episode's tokens.

        A template may trim a text, or leave out earlier thoughts. The tokens of the episode do not change.
        """
        task, tokenizer = self.environment.task, self.environment.tokenizer
        chat = chat_of(task, self.problem)
        turns = [{"role": "user" if i % 2 else "assistant", "content": text} for i, text in enumerate(texts)]
        before, whole = map(self._read, rendered_for(task, tokenizer, [chat, [*chat, *turns]]))
        ours, theirs = full_text(tokenizer, episode), whole.removeprefix(before)
        if ours == theirs:
            return
        self.environment.has_warned = True
        same = next(i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b)
        parts = [repr(text[max(0, same - 20) : same + 20]) for text in (ours, theirs)]
        say(
            f"warning: task.chat_template: for prompt key '{shown(self.problem.key)}' the tokens of the episode read "
            f"{parts[0]} where the tokenizer's template has {parts[1]}; the model is trained on these tokens"
        )

    def _read(self, text: str) -> str:
        tokenizer = self.environment.tokenizer
        return full_text(tokenizer, token_ids(tokenizer, text, add_special_tokens=False))

    def _decoded(self, ids: Sequence[int]) -> str:
        return decode(self.environment.tokenizer, ids, self.environment.spelled)

    def turns_of(self, completion: Completion) -> tuple[str, ...]:
        """Return the texts of all turns of a completion, from the model's first turn on."""
        pairs = zip(completion.episode_ids, completion.is_forced, strict=True)
        pieces = [(forced, [token for token, _ in group]) for forced, group in groupby(pairs, key=lambda pair: pair[1])]
        replies = iter(self._said)
        return tuple(next(replies) if forced else self._decoded(ids) for forced, ids in pieces)
