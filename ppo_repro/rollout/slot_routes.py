"""The routes of the tokens whose keys and values are in the slots of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics.layers.routes import SeenRoutes


class SlotRoutes:
    """For each position of each slot the experts that computed its token, and so its keys and values."""

    def __init__(self, seen: SeenRoutes, slots: int, context: int) -> None:
        self._seen, self._shape = seen, (slots, context)
        self._held: Tensor | None = None  # [slots, context, M k] int32, once the width is known

    def keep(self, slots: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Take the routes of the last forward pass: slots [R], positions and valid [R, L]."""
        routes = self._seen.take().view(*positions.shape, -1)
        if self._held is None:
            self._held = torch.zeros(*self._shape, routes.shape[-1], dtype=torch.int32)
        self._held[slots[:, None].expand_as(positions)[valid], positions[valid]] = routes[valid]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """The first tokens of a slot become those of another one."""
        assert self._held is not None
        self._held[target, :length] = self._held[source, :length]

    def of(self, slot: int, length: int) -> Tensor:
        """Routes of the first tokens of a slot, [length, M k] int32."""
        assert self._held is not None
        return self._held[slot, :length].clone()
