"""Keys and values in fixed slots, held on their grids, so that decoding quantises each of them once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.grid import OPERAND_BITS, operand_bits, quantise
from ppo_repro.numerics.kernels.attention.tiles import COLUMNS, LANES


@dataclass(frozen=True)
class Aim:
    """Where the next pass writes and looks: row r is slot slots[r], its query i sits at positions[r, i]."""

    slots: Tensor  # [R] int64
    positions: Tensor  # [R, L] int64
    valid: Tensor  # [R, L] bool, False for padding: not written, its result not used


class GridCache:
    """Keys and values of every layer in slots; a finished sequence gives its slot to the next.

    What a slot held before is never visible, because a query sees no key after its own position. Keys lie
    transposed in panels of COLUMNS positions, and values in whole vectors, as the kernels read them.
    """

    keeps = False  # whether `keep` does anything; making tensors of what it takes costs as much as a kernel

    def __init__(self, config: PretrainedConfig, slots: int, max_context: int, device: torch.device) -> None:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        layers = range(config.num_hidden_layers)
        self.dim, self.max_context = dim, max_context
        panels, padded_dim = -(-max_context // COLUMNS), -(-dim // LANES) * LANES
        # keys: grid numbers A 2^(e - p); values: grid integers A, and their scales 2^(e - p)
        self.keys = [torch.zeros(slots, heads, panels, dim, COLUMNS, device=device) for _ in layers]
        self.values = [torch.zeros(slots, heads, max_context, padded_dim, device=device) for _ in layers]
        self.value_scales = [torch.zeros(slots, heads, max_context, device=device) for _ in layers]
        self.aimed: Aim | None = None

    @cached_property
    def arrays(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Keys, values and scales of each layer as kernels take them; for a cache on the CPU."""
        stores = zip(self.keys, self.values, self.value_scales, strict=True)
        return [(keys.numpy(), values.numpy(), scales.numpy()) for keys, values, scales in stores]

    def aim(self, slots: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Set what the next pass over all layers writes and sees.

        Raises NumericsError for a slot or a position that the cache does not have.
        """
        for name, index, size in (("slot", slots, len(self.values[0])), ("position", positions, self.max_context)):
            low, high = int(index.min()), int(index.max())
            if low < 0 or high >= size:
                raise NumericsError(f"key/value cache: {name} {low if low < 0 else high} is not in 0..{size - 1}")
        self.aimed = Aim(slots, positions, valid)

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Where a cache of another kind puts new keys and values [R, Hk, L, D] besides, as they are."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put new keys and values [R, Hk, L, D] float32 on their grids and store the valid ones."""
        assert self.aimed is not None, "aim first"
        valid, positions = self.aimed.valid, self.aimed.positions
        rows, columns = self.aimed.slots[:, None].expand_as(positions)[valid], positions[valid]
        new_keys, new_values = keys.transpose(1, 2)[valid], values.transpose(1, 2)[valid]
        key_grid, key_scale = quantise(new_keys, operand_bits(self.dim), where="attention")
        value_grid, value_scale = quantise(new_values, OPERAND_BITS, where="attention")
        self.keys[layer][rows, :, columns // COLUMNS, :, columns % COLUMNS] = (key_grid * key_scale).to(torch.float32)
        self.values[layer][rows, :, columns, : self.dim] = value_grid.to(torch.float32)
        self.value_scales[layer][rows, :, columns] = value_scale[..., 0].to(torch.float32)

    def read(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the aimed slots hold: keys and values [R, Hk, width, D], scales [R, Hk, width, 1], float64."""
        assert self.aimed is not None, "aim first"
        slots, width = self.aimed.slots, int(self.aimed.positions.max()) + 1
        panels = self.keys[layer][slots, :, : -(-width // COLUMNS)]
        keys = panels.transpose(-1, -2).flatten(2, 3)[:, :, :width]
        values = self.values[layer][slots, :, :width, : self.dim]
        scales = self.value_scales[layer][slots, :, :width, None]
        return keys.to(torch.float64), values.to(torch.float64), scales.to(torch.float64)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` positions of slot `source`."""
        for store in self.keys:
            # the rest of the last panel is not visible before it is written
            store[target, :, : -(-length // COLUMNS)] = store[source, :, : -(-length // COLUMNS)]
        for store in (*self.values, *self.value_scales):
            store[target, :, :length] = store[source, :, :length]
