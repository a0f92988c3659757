"""Render a prompt with another chat template, or with none: the most frequent fault of stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.tasks.templates import Chat, rendered

Ids = Sequence[int]
TEMPLATED, TWICE = "prompt in the chat template", "prompt in the chat template twice"
BARE = "prompt without the chat template"
CUED, CUED_TWICE = "prompt with the generation prompt after it", "prompt with a second generation prompt after it"
UNCUED = "prompt without the generation prompt"
NO_DEFAULT, NO_SYSTEM = "prompt without the template's default system turn", "prompt without its system turn"
DEFAULT = "prompt with the template's default system turn"
_USER, _MODEL, _LATER, _SYSTEM = (f"ppo-repro-{word}" for word in ("content", "answer", "question", "rules"))


def templated(tokenizer: Any, prompts: Sequence[Ids]) -> dict[str, list[Ids]]:
    """Return the prompts after each change of the chat template, by description; () for a prompt without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return {}

    def said(chats: Sequence[Chat], cue: bool = False) -> list[str]:
        try:
            return rendered(tokenizer, chats, cue)
        except UserError:  # a template may refuse a conversation
            return [""] * len(chats)

    def ids(text: str, special: bool = False) -> Ids:
        return tuple(tokenizer(text, add_special_tokens=special).input_ids) if text else ()

    texts = [str(tokenizer.decode(list(prompt), skip_special_tokens=False)) for prompt in prompts]
    user = {"role": "user", "content": _USER}
    (begun,), (whole,) = said([[user]]), said([[user]], True)
    begin, mark, end = whole.partition(_USER)
    if not mark:
        return {}
    cue = whole.removeprefix(begun) if whole.startswith(begun) else ""
    close = begun.partition(_USER)[2]
    turns = [user, {"role": "assistant", "content": _MODEL}, {"role": "user", "content": _LATER}]
    between = said([turns])[0].partition(_MODEL)[2].partition(_LATER)[0]
    opening = between.removeprefix(close) if between.startswith(close) else between  # of a user's turn
    first = str(getattr(tokenizer, "bos_token", None) or "")
    first = first if begin.startswith(first) else ""
    default = begin.removeprefix(first).removesuffix(opening) if opening and begin.endswith(opening) else ""
    given = said([[{"role": "system", "content": _SYSTEM}, user]])[0].partition(_USER)[0]
    before, _, after = given.removeprefix(first).partition(_SYSTEM)  # a system turn's text

    def starts(text: str) -> bool:
        return bool(opening) and text.startswith(first + opening)

    def without_default(text: str) -> str:
        found = first + text.removeprefix(first + default)
        return found if default and text.startswith(first + default) and starts(found) else ""

    def without_system(text: str) -> str:
        there = before and after.endswith(opening) and text.startswith(first + before)
        _, _, rest = text.partition(after) if there and opening else ("", "", "")
        return first + opening + rest if rest else ""

    def with_default(text: str) -> str:
        left = text if starts(text) else without_system(text)
        found = first + default + left.removeprefix(first) if default and left else ""
        return found if found != text else ""

    def bare(text: str) -> str:
        is_whole = text.startswith(begin) and text.endswith(end)
        return text.removeprefix(begin).removesuffix(end) if is_whole else ""

    are_whole = [starts(text) or bool(without_system(text)) or text.startswith(begin) for text in texts]
    inside = said([[{"role": "user", "content": text}] for text in texts], True)

    def changed(change: Callable[[str], str], special: bool = False) -> list[Ids]:
        return [ids(change(text), special) for text in texts]

    return {
        TEMPLATED: [() if is_whole else ids(text) for text, is_whole in zip(inside, are_whole, strict=True)],
        TWICE: [ids(text) if is_whole else () for text, is_whole in zip(inside, are_whole, strict=True)],
        BARE: changed(bare, special=True),
        CUED: changed(lambda text: text + cue if cue and not text.endswith(cue) else ""),
        CUED_TWICE: changed(lambda text: text + cue if cue and text.endswith(cue) else ""),
        UNCUED: changed(lambda text: text.removesuffix(cue) if cue and text.endswith(cue) else ""),
        NO_DEFAULT: changed(without_default),
        NO_SYSTEM: changed(without_system),
        DEFAULT: changed(with_default),
    }
