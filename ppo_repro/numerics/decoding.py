"""One token for each of some sequences through the parts of a trunk."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.kernels import layer_parts
from ppo_repro.numerics.fused_attention import attend_arrays
from ppo_repro.numerics.kv_cache import GridCache
from ppo_repro.numerics.products import array
from ppo_repro.numerics.trunk import Layer, Trunk, normed, products


@torch.no_grad()
def decode(trunk: Trunk, ids: Tensor, cache: GridCache) -> Tensor:
    """Hidden states [R, H] float32 of ids [R] int64, one token at each place that `cache` aims at.

    The bits are those of the trunk's own forward. Raises NumericsError where a number is not finite.
    """
    assert cache.aimed is not None, "aim first"
    positions = cache.aimed.positions.numpy()
    x = array(trunk.embedding)[ids.numpy()]
    for layer in trunk.layers:
        dim = layer.spec.dim
        query, key, value = products((layer.query, layer.key, layer.value), normed(layer.before_attention, x)[0])
        if layer.query_norm is not None and layer.key_norm is not None:
            query = normed(layer.query_norm, query.reshape(-1, dim))[0].reshape(query.shape)
            key = normed(layer.key_norm, key.reshape(-1, dim))[0].reshape(key.shape)
        for rotated in (query, key):
            layer_parts.rotate(rotated, trunk.cosine, trunk.sine, positions[:, 0], dim)
        cache.keep(layer.index, *(torch.from_numpy(new).view(len(x), -1, 1, dim) for new in (key, value)))
        x += products((layer.out,), _attend(layer, query, key, value, cache))[0]
        gate, up = products((layer.gate, layer.up), normed(layer.before_mlp, x)[0])
        x += products((layer.down,), layer_parts.silu_times(gate, up))[0]
    return torch.from_numpy(normed(trunk.last, x)[0])


def _attend(layer: Layer, query: np.ndarray, key: np.ndarray, value: np.ndarray, cache: GridCache) -> np.ndarray:
    assert cache.aimed is not None
    end = cache.aimed.positions.numpy() + 1
    begin = np.zeros_like(end) if layer.window is None else np.maximum(end - layer.window, 0)
    try:
        return attend_arrays(query, key, value, cache, layer.index, begin, end, layer.spec)
    except NumericsError as error:
        raise NumericsError(f"layer {layer.index}: {error}") from None
