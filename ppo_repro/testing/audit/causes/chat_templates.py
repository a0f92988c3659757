"""Render a prompt with another chat template, or with none: the most frequent fault of stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.tasks.templates import Chat, Ids, rendered

_USER, _MODEL, _LATER, _SYSTEM = (f"ppo-repro-{word}" for word in ("content", "answer", "question", "rules"))


@dataclass(frozen=True)
class Template:
    """The texts that a chat template puts around the texts of a prompt; "" for a text that the template does not have.

    A prompt is `first + default + opening + question + end`, and `end` ends with `cue`. With a system turn of its own
    it is `first + before + rules + after + question + end`, and `after` ends with `opening`. The methods change a
    prompt; they return None if the prompt or the template does not have what changes. The comments have the texts of a
    template that makes `<s|Be kind.><u|Hello><a|` of `Hello`.
    """

    begin: str  # `<s|Be kind.><u|`: all before the user's text
    end: str  # `><a|`: all after it
    cue: str  # `<a|`: the generation prompt
    first: str  # the BOS token if the template has it, here none
    opening: str  # `<u|`: of a user's turn
    default: str  # `<s|Be kind.>`: the system turn of a chat that has none
    before: str  # `<s|`: of a chat's own system turn, before its text
    after: str  # `><u|`: from this text to the user's

    def is_whole(self, text: str) -> bool:
        """Return whether a prompt is in this template."""
        return self._starts(text) or self.without_system(text) is not None or text.startswith(self.begin)

    def _starts(self, text: str) -> bool:
        return bool(self.opening) and text.startswith(self.first + self.opening)

    def without_default(self, text: str) -> str | None:
        """Return a prompt without the default system turn."""
        start = self.first + self.default
        if not self.default or not text.startswith(start):
            return None
        found = self.first + text.removeprefix(start)
        return found if self._starts(found) else None

    def without_system(self, text: str) -> str | None:
        """Return a prompt without any system turn."""
        has_turns = self.opening and self.before and self.after.endswith(self.opening)
        if not has_turns or not text.startswith(self.first + self.before):
            return None
        _, _, question = text.partition(self.after)
        return self.first + self.opening + question if question else None

    def with_default(self, text: str) -> str | None:
        """Return a prompt with the default system turn, in place of the prompt's own."""
        without = text if self._starts(text) else self.without_system(text)
        if not self.default or without is None:
            return None
        found = self.first + self.default + without.removeprefix(self.first)
        return found if found != text else None

    def bare(self, text: str) -> str | None:
        """Return the user's text alone."""
        is_whole = text.startswith(self.begin) and text.endswith(self.end)
        return text.removeprefix(self.begin).removesuffix(self.end) if is_whole else None

    def cued(self, text: str) -> str | None:
        """Return a prompt that has no generation prompt with one."""
        return text + self.cue if self.cue and not text.endswith(self.cue) else None

    def cued_twice(self, text: str) -> str | None:
        """Return a prompt that has a generation prompt with a second one."""
        return text + self.cue if self.cue and text.endswith(self.cue) else None

    def uncued(self, text: str) -> str | None:
        """Return a prompt without its generation prompt."""
        return text.removesuffix(self.cue) if self.cue and text.endswith(self.cue) else None


def parsed(tokenizer: Any) -> Template | None:
    """Return the texts of a tokenizer's chat template; None if the template leaves out the user's text."""
    user = {"role": "user", "content": _USER}
    (begun,), (whole,) = _said(tokenizer, [[user]]), _said(tokenizer, [[user]], True)
    begin, mark, end = whole.partition(_USER)
    if not mark:
        return None
    cue = whole.removeprefix(begun) if whole.startswith(begun) else ""
    close = begun.partition(_USER)[2]
    turns = [user, {"role": "assistant", "content": _MODEL}, {"role": "user", "content": _LATER}]
    between = _said(tokenizer, [turns])[0].partition(_MODEL)[2].partition(_LATER)[0]
    opening = between.removeprefix(close) if between.startswith(close) else between
    first = str(getattr(tokenizer, "bos_token", None) or "")
    first = first if begin.startswith(first) else ""
    default = begin.removeprefix(first).removesuffix(opening) if opening and begin.endswith(opening) else ""
    given = _said(tokenizer, [[{"role": "system", "content": _SYSTEM}, user]])[0].partition(_USER)[0]
    before, _, after = given.removeprefix(first).partition(_SYSTEM)
    return Template(begin, end, cue, first, opening, default, before, after)


def _said(tokenizer: Any, chats: Sequence[Chat], cue: bool = False) -> list[str]:
    """Return the texts of chats; "" for each if the template refuses them."""
    try:
        return rendered(tokenizer, chats, cue)
    except UserError:
        return [""] * len(chats)


@dataclass(frozen=True)
class TemplateChange:
    """A prompt with another template: its text after change(template, text of the prompt, this text in the template).

    The change is None for a prompt that does not have what changes.
    """

    words: str
    change: Callable[[Template, str, str], str | None]
    has_special_tokens: bool = False  # whether the tokenizer adds its BOS and EOS tokens to the text


CHANGES = (
    TemplateChange("prompt in the chat template", lambda t, text, inside: None if t.is_whole(text) else inside),
    TemplateChange("prompt in the chat template twice", lambda t, text, inside: inside if t.is_whole(text) else None),
    TemplateChange("prompt without the chat template", lambda t, text, _: t.bare(text), has_special_tokens=True),
    TemplateChange("prompt with the generation prompt after it", lambda t, text, _: t.cued(text)),
    TemplateChange("prompt with a second generation prompt after it", lambda t, text, _: t.cued_twice(text)),
    TemplateChange("prompt without the generation prompt", lambda t, text, _: t.uncued(text)),
    TemplateChange("prompt without the template's default system turn", lambda t, text, _: t.without_default(text)),
    TemplateChange("prompt without its system turn", lambda t, text, _: t.without_system(text)),
    TemplateChange("prompt with the template's default system turn", lambda t, text, _: t.with_default(text)),
)


@dataclass(frozen=True)
class Texts:
    """The texts of a dump's prompts, and each of them in the chat template again, "" if the template refuses it."""

    tokenizer: Any
    template: Template
    plain: list[str]
    inside: list[str]

    def changed(self, row: TemplateChange, i: int) -> Ids:
        """Return the ids of prompt i after a change; () if the prompt does not have what changes."""
        text = row.change(self.template, self.plain[i], self.inside[i])
        return tuple(self.tokenizer(text, add_special_tokens=row.has_special_tokens).input_ids) if text else ()


def texts_of(tokenizer: Any, prompts: Sequence[Ids]) -> Texts | None:
    """Return the texts of prompts; None for a tokenizer without a chat template."""
    template = parsed(tokenizer) if getattr(tokenizer, "chat_template", None) else None
    if template is None:
        return None
    plain = [str(tokenizer.decode(list(prompt), skip_special_tokens=False)) for prompt in prompts]
    inside = _said(tokenizer, [[{"role": "user", "content": text}] for text in plain], True)
    return Texts(tokenizer, template, plain, inside)
