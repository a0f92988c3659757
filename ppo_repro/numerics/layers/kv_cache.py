"""Keys and values in fixed slots: on their grids for exact attention, as they are for stock attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.grid import RIGHT_BITS, quantise
from ppo_repro.numerics.kernels.attention.tiles import COLUMNS, LANES
from ppo_repro.numerics.layers.families import head_dim, key_value_heads


@dataclass(frozen=True)
class Target:
    """Where the next pass writes and looks: row r is slot slots[r], its query i sits at positions[r, i]."""

    slots: Tensor  # [R] int64
    positions: Tensor  # [R, L] int64
    valid: Tensor  # [R, L] bool, False for padding: not written, its result not used

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, positions and valid as kernels take them; for a cache on the CPU."""
        slots, positions, valid = (x.contiguous().numpy() for x in (self.slots, self.positions, self.valid))
        return slots, positions, valid


class _Slots:
    """A cache of slots. `aim` must be called before each pass; a finished sequence gives its slot to the next.

    What a slot held before is never visible, because a query sees no key after its own position.
    """

    _target: Target | None = None

    @property
    def target(self) -> Target:
        """Where the pass in progress writes and looks."""
        assert self._target is not None, "aim first"
        return self._target


class GridCache(_Slots):
    """Keys and values of every layer on their grids, so that each of them is quantised once.

    Keys lie transposed in panels of COLUMNS positions, and values in whole vectors, as the kernels read them.
    """

    keeps = False  # whether `keep` does anything; making tensors of its arguments costs as much as a kernel

    def __init__(self, config: PretrainedConfig, slots: int, max_context: int, device: torch.device) -> None:
        dim, heads, layers = head_dim(config), key_value_heads(config), range(config.num_hidden_layers)
        self.dim, self.max_context = dim, max_context
        panels, padded_dim = -(-max_context // COLUMNS), -(-dim // LANES) * LANES
        # keys: grid numbers A 2^(e - p); values: grid integers A, and their scales 2^(e - p)
        self.keys = [torch.zeros(slots, heads, panels, dim, COLUMNS, device=device) for _ in layers]
        self.values = [torch.zeros(slots, heads, max_context, padded_dim, device=device) for _ in layers]
        self.value_scales = [torch.zeros(slots, heads, max_context, device=device) for _ in layers]

    @cached_property
    def arrays(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Keys, values and scales of each layer as kernels take them; for a cache on the CPU."""
        stores = zip(self.keys, self.values, self.value_scales, strict=True)
        return [(keys.numpy(), values.numpy(), scales.numpy()) for keys, values, scales in stores]

    def aim(self, slots: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Set what the next pass over all layers writes and sees, see `Target`.

        Raises NumericsError for a slot or a position that the cache does not have.
        """
        for name, index, size in (("slot", slots, len(self.values[0])), ("position", positions, self.max_context)):
            low, high = int(index.min()), int(index.max())
            if low < 0 or high >= size:
                raise NumericsError(f"key/value cache: {name} {low if low < 0 else high} is not in 0..{size - 1}")
        self._target = Target(*(x.to(self.keys[0].device) for x in (slots, positions, valid)))

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Where a subclass also stores new keys and values [R, Hk, L, D] unquantised."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put new keys and values [R, Hk, L, D] float32 on their grids and store the valid ones."""
        valid, positions = self.target.valid, self.target.positions
        rows, columns = self.target.slots[:, None].expand_as(positions)[valid], positions[valid]
        new_keys, new_values = keys.transpose(1, 2)[valid], values.transpose(1, 2)[valid]
        key_grid, key_scale = quantise(new_keys, RIGHT_BITS, where="attention")
        value_grid, value_scale = quantise(new_values, RIGHT_BITS, where="attention")
        self.keys[layer][rows, :, columns // COLUMNS, :, columns % COLUMNS] = (key_grid * key_scale).to(torch.float32)
        self.values[layer][rows, :, columns, : self.dim] = value_grid.to(torch.float32)
        self.value_scales[layer][rows, :, columns] = value_scale[..., 0].to(torch.float32)

    def read(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Contents of the target's slots: keys and values [R, Hk, width, D], scales [R, Hk, width, 1], float64."""
        slots, width = self.target.slots, int(self.target.positions.max()) + 1
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


class SlotCache(_Slots):
    """Keys and values [slots, Hk, max_context, D] per layer, handed to a stock model as `past_key_values`."""

    def __init__(
        self,
        config: PretrainedConfig,
        slots: int,
        max_context: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (slots, key_value_heads(config), max_context, head_dim(config))
        self.keys, self.values = (
            [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_hidden_layers)] for _ in range(2)
        )

    def aim(self, slots: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Set what the next pass over all layers writes and sees, see `Target`."""
        self._target = Target(*(x.to(self.keys[0].device) for x in (slots, positions, valid)))
        self._rows = slots[:, None].expand_as(positions)[valid]
        self._positions = positions[valid]
        self._width = int(positions.max()) + 1

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write [R, Hk, L, D] and return all keys and values of the rows, [R, Hk, width, D]."""
        slots, valid = self.target.slots, self.target.valid
        for store, new in ((self.keys[layer_idx], keys), (self.values[layer_idx], values)):
            store[self._rows, :, self._positions] = new.transpose(1, 2)[valid]
        return self.keys[layer_idx][slots, :, : self._width], self.values[layer_idx][slots, :, : self._width]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` positions of slot `source`."""
        for store in (*self.keys, *self.values):
            store[target, :, :length] = store[source, :, :length]
