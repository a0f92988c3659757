"""Run a trunk in stock torch: transformers' forward pass over padded rows, and a cache of fixed seats for decoding.

Native numerics are the negative control, and the numerics for devices without kernels. They promise no bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.numerics.families import FAMILIES, attention_of, decoder_layers, head_dim, key_value_heads, routers
from ppo_repro.numerics.interface import Ints, ints
from ppo_repro.numerics.sequences import Ragged, index


class NativeCache:
    """Cache of keys and values [seats, Hk, positions, D] of each layer, for a model's `past_key_values`.

    Earlier contents of a seat are never visible, because a query sees no key after its own position.
    """

    def __init__(
        self, config: PretrainedConfig, seats: int, positions: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Allocate cleared memory for keys and values."""
        shape = (seats, key_value_heads(config), positions, head_dim(config))
        self.keys, self.values = (
            [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_hidden_layers)] for _ in range(2)
        )

    def aim(self, seats: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Set the target of the next pass: row r is seat seats[r], valid query i is at positions[r, i], [R, L]."""
        seats, positions, valid = (x.to(self.keys[0].device) for x in (seats, positions, valid))
        self._seats, self._valid = seats, valid
        self._rows, self._positions = seats[:, None].expand_as(positions)[valid], positions[valid]
        self._width = int(positions.max()) + 1

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write [R, Hk, L, D] and return all keys and values of the rows, [R, Hk, width, D]."""
        for store, new in ((self.keys[layer_idx], keys), (self.values[layer_idx], values)):
            store[self._rows, :, self._positions] = new.transpose(1, 2)[self._valid]
        stores = self.keys[layer_idx], self.values[layer_idx]
        return stores[0][self._seats, :, : self._width], stores[1][self._seats, :, : self._width]


def _visible(first: Tensor, last: Tensor, window: int | None, keys: int) -> Tensor:
    """Return bool [R, 1, L, keys]: query i of row r sees keys first[r, i]..last[r, i], at most the last `window`."""
    columns = torch.arange(keys, device=last.device)
    begin = first if window is None else torch.maximum(first, last - window + 1)
    return ((columns >= begin[..., None]) & (columns <= last[..., None]))[:, None]


def _masks(config: PretrainedConfig, visible: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
    """Return the mask, or the masks by type of layer, for `attention_mask` of the stock model's forward.

    `visible(window)` is the bool mask [R, 1, I, J] of a layer whose queries see the last `window` keys, or all (None).
    Attention outside of torch adds its mask to the scores.
    """

    def mask(window: int | None) -> Tensor:
        seen = visible(window)
        if attention_of(config) == "sdpa":
            return seen
        return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, torch.finfo(torch.float32).min)

    windows = FAMILIES[config.model_type].windows
    if windows == "by layer_types":
        by_type = {"full_attention": None, "sliding_attention": config.sliding_window}
        return {kind: mask(by_type[kind]) for kind in sorted(set(config.layer_types))}
    return mask(config.sliding_window if windows == "every layer" else None)


def _padded_rows(batch: Ragged, padding: str) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out sequences as R rows of L positions: padded rows (`right`, `left`), or one row for all (`none`).

    Returns:
        Token ids and positions [R, L], 0 at padding, and the index [n] in 0..R L - 1 of each token of the batch.
    """
    lengths, count = batch.lengths, len(batch.lengths)
    shape = (1, int(lengths.sum())) if padding == "none" else (count, int(lengths.max()))
    rows = np.arange(count) * shape[1]
    begin = {"none": batch.start[:-1], "right": rows, "left": rows + shape[1] - lengths}[padding]
    flat_index = np.repeat(begin - batch.start[:-1], lengths) + np.arange(len(batch.ids))
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    ids.flat[flat_index], positions.flat[flat_index] = batch.ids, batch.rows.position
    return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(flat_index)


class NativeNetwork:
    """Passes of one trunk by stock torch."""

    def __init__(self, trunk: PreTrainedModel) -> None:
        self.trunk = trunk

    def prepare(self) -> None:
        """Do nothing, because stock torch needs no packed weights."""

    def make_cache(self, seats: int, positions: int) -> NativeCache:
        return NativeCache(self.trunk.config, seats, positions, self.trunk.device, self.trunk.dtype)

    def copy_prefix(self, cache: NativeCache, source: int, target: int, positions: int) -> None:
        for store in (*cache.keys, *cache.values):
            store[target, :, :positions] = store[source, :, :positions]

    @torch.no_grad()
    def over_cache(
        self, batch: Ragged, cache: NativeCache, seats: Sequence[int], seen: bool = False
    ) -> tuple[Tensor, Ints | None]:
        ids, positions, flat_index = _padded_rows(batch, "right")
        valid = torch.zeros(ids.shape, dtype=torch.bool)
        valid.view(-1)[flat_index] = True
        # a padding token is a query at position 0, so that it sees one key; its result is not used
        cache.aim(torch.tensor(list(seats)), positions, valid)
        last = positions.to(self.trunk.device)
        masks = _masks(
            self.trunk.config,
            lambda window: _visible(torch.zeros_like(last), last, window, int(positions.max()) + 1),
        )
        options: dict[str, Any] = {"attention_mask": masks, "past_key_values": cache}
        return self._pass(ids, positions, flat_index, options, seen)

    def over_batch(self, batch: Ragged, wanted: Ints, seen: bool = False) -> tuple[Tensor, Ints | None]:
        """Compute whole sequences, differentiably. Raises UserError if the batch has routes to replay."""
        if batch.routes is not None:
            raise UserError("ppo.replay_routes = true: needs numerics.mode = deterministic; remove it")
        ids, positions, flat_index = _padded_rows(batch, batch.padding)
        last = torch.arange(ids.shape[1]).expand_as(ids)
        first = last.clone()  # a padding token sees only itself
        first.view(-1)[flat_index] = last.reshape(-1)[flat_index] - torch.from_numpy(batch.rows.position)
        first, last = (x.to(self.trunk.device) for x in (first, last))
        masks = _masks(self.trunk.config, lambda window: _visible(first, last, window, ids.shape[1]))
        hidden, routes = self._pass(ids, positions, flat_index, {"attention_mask": masks}, seen)
        return hidden[index(wanted).to(self.trunk.device)], routes

    def _pass(
        self, ids: Tensor, positions: Tensor, places: Tensor, options: dict[str, Any], seen: bool
    ) -> tuple[Tensor, Ints | None]:
        """Return hidden states and routes at flat `places` of a pass of the model over [R, L]."""
        device = self.trunk.device
        where = places.to(device)
        with _recording_gradients(self.trunk), _seen_routes(self.trunk if seen else None) as routes:
            out = self.trunk(input_ids=ids.to(device), position_ids=positions.to(device), use_cache=False, **options)
        hidden = out.last_hidden_state.flatten(0, 1)[where]
        return hidden, ints(torch.cat(routes, -1)[where].cpu()) if seen else None


@contextmanager
def _recording_gradients(trunk: nn.Module) -> Iterator[None]:
    """Put layers in training mode inside `with` if gradients are recorded, because transformers checkpoints only then.

    A pass over a cache records no gradients: in training mode transformers would drop the cache.
    """
    layers = {layer: layer.training for layer in decoder_layers(trunk)} if torch.is_grad_enabled() else {}
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, was_training in layers.items():
            layer.training = was_training


@contextmanager
def _seen_routes(trunk: nn.Module | None) -> Iterator[list[Tensor]]:
    """Yield a list that collects the experts [T, k] that each router chooses inside `with`, by rising index."""
    seen: list[Tensor] = []

    def look(_: nn.Module, __: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        seen.append(out[2].sort(-1).values)

    handles: list[RemovableHandle] = []
    if trunk is not None:
        handles = [router.register_forward_hook(look) for router in routers(trunk)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
