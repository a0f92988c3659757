"""The tokens that causes are tried on: a few for all causes, many for the causes that leave small errors there.

They are windows of neighbouring tokens, each from shortly before the first wrong token of a response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ppo_repro.testing.audit import limits


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `end` of the response with index `response`."""

    response: int
    start: int
    end: int

    @property
    def here(self) -> slice:
        """Return the positions of the tokens in the response."""
        return slice(self.start, self.end)

    @property
    def size(self) -> int:
        """Return the number of tokens."""
        return self.end - self.start


@dataclass(frozen=True)
class Tokens:
    """Windows of tokens; for screening, other models and inputs are computed in float32, which suffices."""

    windows: tuple[Window, ...]
    is_screening: bool = False


@dataclass(frozen=True)
class WrongResponse:
    """A response with a wrong log-prob."""

    index: int
    prompt: int  # tokens of the prompt
    usable: Tensor  # bool [n]
    is_wrong: Tensor  # bool [n]

    @cached_property
    def first(self) -> int:
        """Return the first wrong token."""
        return int((self.is_wrong.nonzero()[:1, 0].tolist() or [0])[0])


def few_and_many(wrong: Sequence[WrongResponse]) -> tuple[Tokens, Tokens]:
    """Return the tokens for all causes, and the tokens for the best causes."""
    few = _windows(wrong, limits.WINDOW, limits.SCREENED, limits.WINDOW)
    length = max(limits.LONG_WINDOW, math.ceil(limits.TRIED / len(wrong)))
    many = _windows(wrong, length, limits.TRIED, limits.TRIED)
    last = many[-1]
    size = next(len(response.usable) for response in wrong if response.index == last.response)
    if size > last.end:  # a cause has to be right at the end of a response too
        many += (Window(last.response, max(last.end, size - limits.LONG_WINDOW), size),)
    return Tokens(few, is_screening=True), Tokens(many)


def _windows(wrong: Sequence[WrongResponse], length: int, enough: int, enough_wrong: int) -> tuple[Window, ...]:
    """Return windows until they have `enough` usable tokens, or `enough_wrong` wrong ones.

    A window has `length` tokens, or up to twice as many if they are the rest of the response. Responses with few tokens
    before their window come first, for short passes.
    """
    windows = list[Window]()
    usable = count_wrong = 0
    for response in sorted(wrong, key=lambda response: max(response.first, limits.WINDOW) + response.prompt):
        if usable < enough and count_wrong < enough_wrong:
            size = len(response.usable)
            start = max(0, response.first - min(limits.WINDOW, length // 2))
            end = size if size - start <= 2 * length else start + length
            windows.append(Window(response.index, start, end))
            usable += int(response.usable[start:end].sum())
            count_wrong += int(response.is_wrong[start:end].sum())
    return tuple(windows)
