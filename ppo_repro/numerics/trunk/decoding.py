"""A forward pass over a key/value cache without modules: prompts being read, and one token of each sequence."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels.core import pool
from ppo_repro.numerics.layers.fused_attention import attend_arrays
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.products import array
from ppo_repro.numerics.trunk.layer import Attended, Rotary, layer_forward, normalise, rotary_at
from ppo_repro.numerics.trunk.weights import Layer, Trunk
from ppo_repro.numerics.trunk.whole import WholeTrunk

# every thread reads all weights of a layer for its rows; larger products are better shared out by their columns
# (two threads, 16 rows: 0.7 of the time by rows with layers of 3 MiB, 1.4 times the time with layers of 42)
MOST_BYTES = 4 << 20
# 16-bit digits of the weights, six bytes each, are kept beside them where that is little: it is in no plan
MOST_DIGIT_BYTES, DIGIT_BYTES = 64 << 20, 6
MANY_ROWS = 8  # from which on the kernels one by one are faster with such layers on one thread too (a tenth, 4x896)


class Decoder:
    """A trunk, and the same as one call, made anew when a weight changes."""

    def __init__(self, trunk: Trunk) -> None:
        self.trunk = trunk
        linears = [linear for layer in trunk.layers for linear in layer.linears]
        self._parameters = [p for linear in linears for p in (linear.weight, linear.bias) if p is not None]
        self._largest = max(4 * sum(linear.weight.numel() for linear in layer.linears) for layer in trunk.layers)
        size = sum(linear.weight.numel() for linear in linears)
        self._in_digits = self._largest <= MOST_BYTES and DIGIT_BYTES * size <= MOST_DIGIT_BYTES
        self._made_from: tuple[object, ...] = ()
        self._whole: WholeTrunk | None = None

    def whole(self, rows: int) -> WholeTrunk | None:
        """The trunk as one call for `rows` on `float64`; None where its kernels have to be called one by one.

        NumericsError where a weight is not finite.
        """
        threads = pool.threads()
        made_from = tuple((p.data_ptr(), p._version) for p in self._parameters)
        if backend.active() != "float64" or (self._largest > MOST_BYTES and (threads > 1 or rows >= MANY_ROWS)):
            return None
        if self._whole is None or made_from != self._made_from:
            self._whole, self._made_from = WholeTrunk(self.trunk, self._in_digits), made_from
        return self._whole


def hidden_states(decoder: Decoder, ids: Tensor, cache: GridCache, rows: Tensor | None = None) -> Tensor:
    """Final hidden states [n, H] float32 of the tokens `ids` [R, L] int64 in the target of `cache`.

    `rows` [n] int64 are flat positions in [R, L]; None takes all. The bits are those of the trunk's own forward.
    Raises NumericsError where a number is not finite, IndexError for a position beyond max_context.
    """
    trunk = decoder.trunk
    positions = cache.target.arrays[1]
    rotary = rotary_at(trunk, positions.reshape(-1))
    wanted = None if rows is None else rows.numpy()
    x = array(trunk.embedding)[ids.reshape(-1).numpy()]
    whole = decoder.whole(len(positions)) if positions.shape[1] == 1 else None
    if whole is not None:
        _through_whole_trunk(trunk, whole, x, cache)
        x = x if wanted is None else x[wanted]
        return torch.from_numpy(normalise(trunk.final_norm, x).y)
    visible = {window: _visible(window, positions) for window in {layer.window for layer in trunk.layers}}
    x = _through_kernels(trunk, x, rotary, cache, visible, wanted)
    return torch.from_numpy(normalise(trunk.final_norm, x).y)


Visible = tuple[np.ndarray, np.ndarray]


def _visible(window: int | None, positions: np.ndarray) -> Visible:
    """The first key that each query sees, and the one after the last."""
    end = positions + 1
    return (np.zeros_like(end) if window is None else np.maximum(end - window, 0)), end


def _keep(cache: GridCache, layer: Layer, key: np.ndarray, value: np.ndarray) -> None:
    shape = *cache.target.positions.shape, layer.spec.kv_heads, layer.spec.dim
    cache.keep(layer.index, *(torch.from_numpy(new).view(shape).transpose(1, 2) for new in (key, value)))


def _through_whole_trunk(trunk: Trunk, whole: WholeTrunk, x: np.ndarray, cache: GridCache) -> None:
    """Change x [R, H] from the embeddings to the last layer's result, some rows on each thread."""
    new = whole.run(x, cache)
    if new is not None:
        for layer, (key, value) in zip(trunk.layers, new, strict=True):
            _keep(cache, layer, key, value)


def _through_kernels(
    trunk: Trunk,
    x: np.ndarray,
    rotary: Rotary,
    cache: GridCache,
    visible: dict[int | None, Visible],
    rows: np.ndarray | None,
) -> np.ndarray:
    """The last layer's result, kernel by kernel; each kernel is shared out to the threads by itself."""

    def attend(layer: Layer, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> Attended:
        if cache.keeps:
            _keep(cache, layer, key, value)
        return Attended(attend_arrays(query, key, value, cache, layer.index, *visible[layer.window], layer.spec))

    for layer in trunk.layers:
        x, _ = layer_forward(layer, x, rotary, attend, rows if layer is trunk.layers[-1] else None)
    return x
