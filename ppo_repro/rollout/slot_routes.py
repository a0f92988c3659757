"""The routes of the tokens whose keys and values are in the slots of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics.rows import index
from ppo_repro.numerics.structs import Ints


class SlotRoutes:
    """For each position of each slot the experts that computed its token, and so its keys and values."""

    def __init__(self, slots: int, context: int) -> None:
        self._shape = slots, context
        self._routes: Tensor | None = None  # [slots, context, M k] int32, once the width is known

    def keep(self, slots: Ints, positions: Ints, routes: Ints) -> None:
        """Take the routes [n, M k] of tokens at positions [n] of slots [n]."""
        if self._routes is None:
            self._routes = torch.zeros(*self._shape, routes.shape[-1], dtype=torch.int32)
        self._routes[index(slots), index(positions)] = torch.from_numpy(routes)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """The first tokens of a slot become those of another one."""
        assert self._routes is not None
        self._routes[target, :length] = self._routes[source, :length]

    def of(self, slot: int, length: int) -> Tensor:
        """Routes of the first tokens of a slot, [length, M k] int32."""
        assert self._routes is not None
        return self._routes[slot, :length].clone()
