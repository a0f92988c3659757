"""Keys and values: in SGLang's pool token by token, and in the kernels' cache request by request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_repro.numerics.network import Network


class PoolCache:
    """A cache with a slot for each entry of SGLang's request table, and the pool from which it can be filled.

    The pool decides: prefixes, retracted requests and chunks come from there. Each token written to the pool gets a
    stamp of its own, and a slot has the stamps of its tokens; where they differ from those of the request's locations
    in the pool, the slot takes the token again. So a token is copied once for each request that sees it, and not once
    for each step.
    """

    def __init__(self, network: Network, table: Tensor, pool: Any, width: int) -> None:
        """Keep the kernels' cache beside SGLang's memory pool.

        Args:
            network: computes keys and values.
            table: [requests, positions], the location in the pool of each token.
            pool: SGLang's keys and values by location.
            width: positions of a request.
        """
        heads, wide = network.model.struct.kv_heads, network.model.struct.head_dim
        self.table, self.pool = table, pool
        self.cache = network.make_cache(len(table), width)
        self.keys = self.cache.keys.view(-1, heads, self.cache.capacity // 16, wide, 16)
        self.values = self.cache.values.view(-1, heads, self.cache.capacity, wide)
        self.written = torch.zeros(len(pool.get_key_buffer(0)), dtype=torch.int64)  # stamp by location
        self.stamps = torch.zeros(self.cache.capacity, dtype=torch.int64)  # by place in the cache
        self.clock = 0

    def take_pasts(self, slots: Tensor, lengths: Tensor) -> None:
        """Bring, before a pass, the first tokens of some slots, so many of each, up to date. int64 [R] both."""
        rows, positions = (torch.arange(int(lengths.max())) < lengths[:, None]).nonzero(as_tuple=True)
        places = slots[rows] * self.cache.each + positions
        locations = self.table[slots[rows], positions].long()
        stale = self.stamps[places] != self.written[locations]
        if not stale.any():
            return
        places, locations = places[stale], locations[stale]
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            keys[:, places // 16, :, places % 16] = self.pool.get_key_buffer(layer)[locations]
            values[:, places] = self.pool.get_value_buffer(layer)[locations].transpose(0, 1)
        self.stamps[places] = self.written[locations]

    def give(self, slots: Tensor, positions: Tensor, locations: Tensor) -> None:
        """Copy, after a pass, its tokens, at positions of slots, to locations of the pool. int64 [N] each."""
        places = slots * self.cache.each + positions
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            self.pool.get_key_buffer(layer)[locations] = keys[:, places // 16, :, places % 16]
            self.pool.get_value_buffer(layer)[locations] = values[:, places].transpose(0, 1)
        stamps = self.clock + 1 + torch.arange(len(locations))
        self.written[locations] = self.stamps[places] = stamps
        self.clock += len(locations)
