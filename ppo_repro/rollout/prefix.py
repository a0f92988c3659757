"""Which slot holds how much of a prompt: token prefixes by a running hash, verified token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def _keys(tokens: Sequence[int]) -> list[int]:
    """A hash of every prefix, shortest first; equal prefixes have equal keys."""
    return list(accumulate(tokens, lambda key, token: hash((key, token)), initial=0))[1:]


class PrefixIndex:
    """The tokens whose keys and values each slot holds."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, ...]] = {}
        self._slots: dict[int, int] = {}  # a slot that held a prefix of this key when it was noted

    def hold(self, slot: int, tokens: Sequence[int]) -> None:
        """From now on `slot` holds exactly these tokens."""
        self._held[slot] = tuple(tokens)
        for key in _keys(tokens):
            self._slots[key] = slot

    def longest(self, prompt: Sequence[int]) -> tuple[int, int]:
        """(slot, number of tokens): the longest prefix of `prompt` found; (0, 0) if there is none."""
        keys = _keys(prompt)
        for length in range(len(keys), 0, -1):
            slot = self._slots.get(keys[length - 1])
            # the slot may hold something else by now, and two prefixes may have one key
            if slot is not None and self._held[slot][:length] == tuple(prompt[:length]):
                return slot, length
        return 0, 0
