"""Keys and values in fixed slots, held on their grids, so that decoding quantises each of them once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppo_repro.numerics.grid import OPERAND_BITS, operand_bits, quantise


@dataclass(frozen=True)
class Aim:
    """Where the next pass writes and looks: row r is slot slots[r], its query i sits at positions[r, i]."""

    slots: Tensor  # [R] int64
    positions: Tensor  # [R, L] int64
    valid: Tensor  # [R, L] bool, False for padding: not written, its result not used


class GridCache:
    """Keys and values [slots, Hk, max_context, D] per layer; a finished sequence gives its slot to the next.

    What a slot held before is never visible, because a query sees no key after its own position.
    """

    def __init__(self, config: PretrainedConfig, slots: int, max_context: int, device: torch.device) -> None:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        layers = range(config.num_hidden_layers)
        shape = (slots, heads, max_context, dim)
        self.keys = [torch.zeros(shape, device=device) for _ in layers]  # grid values A 2^(e - p)
        self.values = [torch.zeros(shape, device=device) for _ in layers]  # grid integers
        self.value_scales = [torch.zeros(shape[:3], device=device) for _ in layers]  # 2^(e - p)
        self.aimed: Aim | None = None

    def aim(self, slots: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Set what the next pass over all layers writes and sees."""
        self.aimed = Aim(slots, positions, valid)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> Aim:
        """Put new keys and values [R, Hk, L, D] float32 on their grids and store the valid ones."""
        assert self.aimed is not None, "aim first"
        valid, positions = self.aimed.valid, self.aimed.positions
        rows, columns = self.aimed.slots[:, None].expand_as(positions)[valid], positions[valid]
        new_keys, new_values = keys.transpose(1, 2)[valid], values.transpose(1, 2)[valid]
        key_grid, key_scale = quantise(new_keys, operand_bits(keys.shape[-1]))
        value_grid, value_scale = quantise(new_values, OPERAND_BITS)
        self.keys[layer][rows, :, columns] = (key_grid * key_scale).to(torch.float32)
        self.values[layer][rows, :, columns] = value_grid.to(torch.float32)
        self.value_scales[layer][rows, :, columns] = value_scale[..., 0].to(torch.float32)
        return self.aimed

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` positions of slot `source`."""
        for store in (*self.keys, *self.values, *self.value_scales):
            store[target, :, :length] = store[source, :, :length]
