"""Episodes of several turns: the end of a model's turn, and the environment's turns, which are encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, zip_longest

from transformers import PreTrainedTokenizerBase

from ppo_repro.base.errors import FunctionFailed, UserError
from ppo_repro.base.output import say, shown
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tasks import TaskConfig
from ppo_repro.engine import Completion
from ppo_repro.tasks.problems import FIELD, Problem, row_of
from ppo_repro.tasks.templates import chat_of, control_tokens_of, rendered_for
from ppo_repro.tasks.tokenizer import decode, full_text, token_ids
from ppo_repro.user.process import UserFunction

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


class Conversations:
    """Environment's turns in some requests; `said` has the environment's texts by the index of the request."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        spelled: frozenset[int],
        step: UserFunction | None,
        problems: Sequence[Problem],
        warned: set[str],
    ) -> None:
        """Begin the episodes of some prompts.

        Args:
            config: the run.
            tokenizer: encodes the environment's texts.
            spelled: special tokens that decoded texts show.
            step: the user's environment; None: an episode has one turn.
            problems: the prompt of each episode.
            warned: names of the warnings that this run has already printed.
        """
        self.config, self.tokenizer, self.spelled = config, tokenizer, spelled
        self.step, self.problems = step, problems
        has_template = config.task.chat_template and step is not None
        self._around = around_reply(config.task, tokenizer) if has_template else ("", "")
        self._has_template, self._warned = has_template, warned
        self._refuse = control_tokens_of(tokenizer, config.task)
        self.said: dict[int, list[str]] = {}
        self._put: dict[int, list[tuple[int, ...]]] = {}  # the tokens of the environment's texts

    def ends(self, turn: Sequence[int]) -> bool:
        """Return whether the text of a turn contains a stop text."""
        stop = self.config.rollout.stop
        text = decode(self.tokenizer, turn, self.spelled) if stop else ""
        return any(one in text for one in stop)

    def reply(self, index: int, turns: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """Call `step` and encode its text; None if the episode ends.

        Raises FunctionFailed if `step` fails or has no room.
        """
        try:
            return self._reply(index, turns)
        except UserError as error:
            raise FunctionFailed(str(error), FIELD) from error

    def _reply(self, index: int, turns: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        if self.step is None:
            return None
        problem, said = self.problems[index], self.said.setdefault(index, [])
        where, of_prompt = self.step.where, f"prompt key '{shown(problem.key)}'"
        spoken = [decode(self.tokenizer, turn, self.spelled) for turn in turns]
        # model and environment alternate; the model has the first and the last turn
        texts = [text for pair in zip(spoken, [*said, ""], strict=True) for text in pair][:-1]
        (text,) = self.step([row_of(problem, texts)])
        if text is None:
            return None
        task, longest = self.config.task, self.config.rollout.max_response_tokens
        if len(turns) == task.turns:
            raise UserError(
                f"task.max_turns = {task.turns}: {where.removeprefix('task.path: ')}: step wants another turn for "
                f"{of_prompt}; let it return None by then, or raise the limit"
            )
        self._refuse(f"{where}: step returned a text for {of_prompt} that", text)
        said.append(text)
        before, after = self._around
        ids = token_ids(self.tokenizer, f"{before}{text}{after}", add_special_tokens=False)
        if before and ids[:1] == (turns[-1][-1],):  # the token that ends the model's turn, if the model has sampled it
            ids = ids[1:]
        if len(ids) >= longest:
            raise UserError(
                f"{where}: step returned a text of {len(ids)} tokens for {of_prompt}, which "
                f"leaves no room in rollout.max_response_tokens = {longest}; return less, or raise it"
            )
        if not ids:
            raise UserError(f"{where}: step returned {text!r}, which has no tokens; return None to end it")
        put = self._put.setdefault(index, [])
        put.append(ids)
        if self._has_template and "template" not in self._warned:
            episode = [token for pair in zip(turns, put, strict=True) for ids_ in pair for token in ids_]
            self._compare(problem, episode, [*texts, text])
        return ids

    def _compare(self, problem: Problem, episode: Sequence[int], texts: Sequence[str]) -> None:
        """Warn once, with both texts, if the template renders the turns so far differently from the episode's tokens.

        A template may trim a text, or leave out earlier thoughts. The tokens of the episode do not change.
        """
        chat = chat_of(self.config.task, problem)
        turns = [{"role": "user" if i % 2 else "assistant", "content": text} for i, text in enumerate(texts)]
        before, whole = map(self._read, rendered_for(self.config.task, self.tokenizer, [chat, [*chat, *turns]]))
        ours, theirs = full_text(self.tokenizer, episode), whole.removeprefix(before)
        if ours == theirs:
            return
        self._warned.add("template")
        same = next(i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b)
        parts = [repr(text[max(0, same - 20) : same + 20]) for text in (ours, theirs)]
        say(
            f"warning: task.chat_template: for prompt key '{shown(problem.key)}' the tokens of the episode read "
            f"{parts[0]} where the tokenizer's template has {parts[1]}; the model is trained on these tokens"
        )

    def _read(self, text: str) -> str:
        return full_text(self.tokenizer, token_ids(self.tokenizer, text, add_special_tokens=False))

    def turns_of(self, index: int, completion: Completion) -> tuple[str, ...]:
        """Return the texts of all turns of a completion, from the model's first turn on."""
        pairs = zip(completion.episode_ids, completion.is_forced, strict=True)
        pieces = [(forced, [token for token, _ in group]) for forced, group in groupby(pairs, key=lambda pair: pair[1])]
        said = iter(self.said.get(index, ()))
        return tuple(next(said) if forced else decode(self.tokenizer, ids, self.spelled) for forced, ids in pieces)
