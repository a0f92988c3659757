"""Which cache slot holds the longest prefix of a prompt: found by a running hash, verified token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def _keys(tokens: Sequence[int]) -> list[int]:
    """A hash of every prefix, shortest first; equal prefixes have equal keys."""
    return list(accumulate(tokens, lambda key, token: hash((key, token)), initial=0))[1:]


class PrefixIndex:
    """The tokens whose keys and values are in each slot."""

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._slots: dict[int, int] = {}  # key of a prefix -> the slot last known to hold it

    def hold(self, slot: int, tokens: Sequence[int]) -> None:
        """Note that `slot` now holds exactly these tokens."""
        self._tokens[slot] = tuple(tokens)
        for key in _keys(tokens):
            self._slots[key] = slot

    def longest(self, prompt: Sequence[int]) -> tuple[int, int]:
        """(slot, number of tokens) of the longest prefix of `prompt` in any slot; (0, 0) if there is none."""
        keys = _keys(prompt)
        for length in range(len(keys), 0, -1):
            slot = self._slots.get(keys[length - 1])
            # the slot may hold other tokens by now, and two prefixes may have the same key
            if slot is not None and self._tokens[slot][:length] == tuple(prompt[:length]):
                return slot, length
        return 0, 0
