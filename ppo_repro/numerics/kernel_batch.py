"""Prepare a batch for the kernels: the cache of its keys and values, checks of its numbers, the C struct `Batch`."""

from __future__ import annotations

import numpy as np
import torch

from ppo_repro.base.errors import UserError
from ppo_repro.numerics.interface import Ints, Struct, ffi, ints, pointer
from ppo_repro.numerics.sequences import Ragged


class Cache:
    """Cache of keys and values: some seats of `positions` tokens each."""

    def __init__(self, model: Struct, seats: int, positions: int, device: torch.device) -> None:
        """Allocate memory for keys and values without clearing it.

        `positions`, the tokens of a seat, are rounded up to a multiple of 16.
        """
        self.each = -(-positions // 16) * 16
        self.capacity = seats * self.each
        floats = model.layers * model.kv_heads * self.capacity * model.head_dim
        self.keys, self.values = (torch.empty(floats, device=device) for _ in range(2))


def cache_of_batch(model: Struct, batch: Ragged, device: torch.device) -> tuple[Cache, Ints]:
    """Return a cache for exactly the sequences of a batch, and the position [S] at which each sequence begins."""
    padded = -(-batch.lengths // 16) * 16
    return Cache(model, 1, int(padded.sum()), device), ints(np.concatenate([[0], np.cumsum(padded)[:-1]]))


class KernelBatch:
    """C struct of a batch, and the memory to which it points."""

    def __init__(self, batch: Ragged, cache: Cache, base: Ints, seen: Ints | None) -> None:
        """Make the struct of a checked batch.

        Args:
            batch: n tokens of S sequences.
            base: [S], the position in the cache at which each sequence begins.
            seen: [n, mixtures x chosen], receives the experts of each token; None if not wanted.
        """
        self.batch, self.cache, self.base, self.seen = batch, cache, base, seen
        members = dict(
            tokens=len(batch.ids),
            sequences=len(batch.start) - 1,
            ids=pointer(batch.ids),
            position=pointer(batch.rows.position),
            sequence=pointer(batch.rows.sequence),
            start=pointer(batch.start),
            base=pointer(base),
            slots=pointer(batch.rows.slots),
            keys=pointer(cache.keys, cache.keys.device),
            values=pointer(cache.values, cache.values.device),
            capacity=cache.capacity,
            routes=pointer(batch.routes),
            seen=pointer(seen),
        )
        self.struct = ffi.new("Batch *", members)


def check_batch(model: Struct, batch: Ragged, max_context: int) -> None:
    """Raise UserError for ids, positions and routes outside the model's ranges, which would read other memory."""
    tokens = len(batch.ids)
    if tokens * max(model.heads, model.mixtures * model.chosen) >= 1 << 31:  # the kernels count them in ints
        raise UserError(f"{tokens} tokens in one pass are too many for this model; make layout's micro-batches smaller")
    if tokens and not 0 <= int(batch.ids.min()) <= int(batch.ids.max()) < model.vocabulary:
        raise UserError(f"token ids: must be in 0..{model.vocabulary - 1}")
    if tokens and int(batch.rows.position.min()) < 0:
        raise UserError("positions: must be at least 0")
    longest = int(batch.rows.position.max(initial=-1)) + 1
    if longest > max_context:
        raise UserError(f"{longest} tokens: numerics.max_context is {max_context}")
    if batch.routes is not None:
        _check_routes(model, batch.routes, tokens)


def _check_routes(model: Struct, routes: Ints, tokens: int) -> None:
    """Raise UserError unless each token has `chosen` experts by rising index in each mixture."""
    if not model.mixtures or routes.size != tokens * model.mixtures * model.chosen:
        raise UserError(f"routes of shape {list(routes.shape)}: must be {model.mixtures} x {model.chosen} a token")
    chosen = routes.reshape(-1, model.chosen)
    outside = len(chosen) > 0 and (int(chosen[:, 0].min()) < 0 or int(chosen[:, -1].max()) >= model.experts)
    if outside or bool((np.diff(chosen, axis=1) <= 0).any()):
        raise UserError(f"routes: must be experts in 0..{model.experts - 1} by rising index, each once")
