"""Copy keys and values between SGLang's pool (by token) and the kernels' cache (by request)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_repro.numerics.network import Network


class PoolCache:
    """Cache with a seat for each row of SGLang's request table, filled from SGLang's pool.

    Prefixes, retracted requests and chunks come from the pool. Each token written to the pool gets a new stamp, and a
    seat stores the stamps of its tokens. If a stamp differs from the stamp at the token's location in the pool, the
    seat copies the token again. So a token is copied once for each request, not once for each step.
    """

    def __init__(self, network: Network, table: Tensor, pool: Any, width: int) -> None:
        """Make the kernels' cache for SGLang's memory pool.

        Args:
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

    def take_pasts(self, seats: Tensor, lengths: Tensor) -> None:
        """Before a pass, copy changed tokens from the pool into seats [R]: the first `lengths` [R] of each, int64."""
        rows, positions = (torch.arange(int(lengths.max())) < lengths[:, None]).nonzero(as_tuple=True)
        places = seats[rows] * self.cache.each + positions
        locations = self.table[seats[rows], positions].long()
        stale = self.stamps[places] != self.written[locations]
        if not stale.any():
            return
        places, locations = places[stale], locations[stale]
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            keys[:, places // 16, :, places % 16] = self.pool.get_key_buffer(layer)[locations]
            values[:, places] = self.pool.get_value_buffer(layer)[locations].transpose(0, 1)
        self.stamps[places] = self.written[locations]

    def give(self, seats: Tensor, positions: Tensor, locations: Tensor) -> None:
        """After a pass, copy its N tokens from positions [N] of seats [N] to locations [N] of the pool, all int64."""
        places = seats * self.cache.each + positions
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            self.pool.get_key_buffer(layer)[locations] = keys[:, places // 16, :, places % 16]
            self.pool.get_value_buffer(layer)[locations] = values[:, places].transpose(0, 1)
        stamps = self.clock + 1 + torch.arange(len(locations))
        self.written[locations] = self.stamps[places] = stamps
        self.clock += len(locations)
