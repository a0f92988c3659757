"""A key/value cache of fixed slots for stock attention; a finished sequence gives its slot to the next."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig


class SlotCache:
    """Keys and values [slots, Hk, max_context, D] per layer, handed to transformers as `past_key_values`.

    `aim` says which slots and positions the next forward pass writes; what a slot held before is never
    visible, because the mask ends at the query's own position.
    """

    def __init__(self, config: PretrainedConfig, slots: int, max_context: int, device: torch.device) -> None:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = (slots, heads, max_context, dim)
        self.keys = [torch.zeros(shape, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, device=device) for _ in range(config.num_hidden_layers)]

    def aim(self, slots: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Next pass: row r is slot slots[r]; it writes where valid. positions, valid [R, L]."""
        self._slots, self._valid = slots, valid
        self._rows = slots[:, None].expand_as(positions)[valid]
        self._positions = positions[valid]
        self._width = int(positions.max()) + 1

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write [R, Hk, L, D] and return everything the rows hold, [R, Hk, width, D]."""
        for store, new in ((self.keys[layer_idx], keys), (self.values[layer_idx], values)):
            store[self._rows, :, self._positions] = new.transpose(1, 2)[self._valid]
        return (
            self.keys[layer_idx][self._slots, :, : self._width],
            self.values[layer_idx][self._slots, :, : self._width],
        )

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` positions of slot `source`."""
        for store in (*self.keys, *self.values):
            store[target, :, :length] = store[source, :, :length]
