"""SGLang's pool of keys and values, and a copy of it on grids, which the kernels read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppo_repro.numerics.layers.kv_cache import GridCache


class PoolCache(GridCache):
    """A GridCache with a slot for each entry of SGLang's request table.

    The pool decides: prefixes, retracted requests and chunks come from there. Each token written to the pool gets a
    stamp of its own, and a slot has the stamps of its tokens; where they differ from those of the request's locations
    in the pool, the slot takes the token again. So a token is put on its grid once for each request that sees it, and
    not once for each step.
    """

    keeps = True

    def __init__(self, config: PretrainedConfig, table: Tensor, pool: Any, width: int) -> None:
        super().__init__(config, len(table), width, table.device)
        self.table, self.pool = table, pool
        here = table.device
        self.written = torch.zeros(len(pool.get_key_buffer(0)), dtype=torch.int64, device=here)  # stamp by location
        self.stamps = torch.zeros(len(table), width, dtype=torch.int64, device=here)  # by slot and position
        self.clock = 0
        self.locations = torch.empty(0, dtype=torch.int64, device=here)

    def begin(self, requests: Tensor, starts: Tensor, lengths: Tensor, locations: Tensor) -> None:
        """Aim at tokens starts[r]..starts[r]+lengths[r]-1 of each request, which go to `locations` of the pool.

        requests, starts, lengths int64 [R]; locations int64 [sum of lengths], request after request.
        """
        self._take_prefixes(requests, starts)
        columns = torch.arange(int(lengths.max()), device=lengths.device)
        valid = columns < lengths[:, None]
        # a padded query is at position 0, where it sees one key, and its result is not used
        positions = torch.where(valid, starts[:, None] + columns, 0)
        self.aim(requests, positions, valid)
        self.locations = locations
        stamps = self.clock + 1 + torch.arange(len(locations), device=locations.device)
        self.clock += len(locations)
        self.written[locations] = stamps
        self.stamps[requests[:, None].expand_as(positions)[valid], positions[valid]] = stamps

    def _take_prefixes(self, requests: Tensor, starts: Tensor) -> None:
        width = int(starts.max())
        if width == 0:
            return
        locations = self.table[requests, :width].to(torch.int64)
        known = torch.arange(width, device=starts.device) < starts[:, None]
        stale = known & (self.stamps[requests, :width] != self.written[locations])
        counts = stale.sum(1)
        if not int(counts.max()):
            return
        rows = counts > 0
        # the stale positions of each row to the left, in order
        order = torch.argsort((~stale[rows]).to(torch.int8), dim=1, stable=True)[:, : int(counts.max())]
        valid = torch.arange(order.shape[1], device=counts.device) < counts[rows][:, None]
        self.aim(requests[rows], order, valid)
        sources = locations[rows].gather(1, order)
        for layer in range(len(self.keys)):
            keys, values = self.pool.get_key_buffer(layer)[sources], self.pool.get_value_buffer(layer)[sources]
            self.write(layer, keys.transpose(1, 2), values.transpose(1, 2))
        self.stamps[requests[rows][:, None].expand_as(order)[valid], order[valid]] = self.written[sources[valid]]

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put new keys and values [R, Hk, L, D] float32 into SGLang's pool."""
        valid = self.target.valid
        self.pool.get_key_buffer(layer)[self.locations] = keys.transpose(1, 2)[valid]
        self.pool.get_value_buffer(layer)[self.locations] = values.transpose(1, 2)[valid]
