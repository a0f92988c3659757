"""One token for each of some sequences through the parts of a trunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.grid import operand_bits
from ppo_repro.numerics.kernels import decoder_layer, layer_parts
from ppo_repro.numerics.kernels.amx import product
from ppo_repro.numerics.kernels.amx.operands import MAX_TERMS
from ppo_repro.numerics.kernels.core import pool
from ppo_repro.numerics.layers.fused_attention import NOT_FINITE, attend_arrays, cost
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.products import array
from ppo_repro.numerics.trunk.weights import Layer, Linear, Norm, Trunk, normed, products

# every thread reads all weights of a layer for its rows; products of larger ones are better shared out by their columns
# (two threads, 16 rows: 0.7 of the time by rows with layers of 3 MiB, 1.4 times the time with layers of 42)
MOST_BYTES = 4 << 20
PRODUCT_NANOSECONDS = 0.004  # of a multiplication; only to know how many threads are worth waking
_NO_NORM = decoder_layer.Norm(np.empty(0, np.float32), 0.0, 0)


class Decoder:
    """A trunk, and its weights as whole layers take them, made anew when a weight or the backend changes."""

    def __init__(self, trunk: Trunk) -> None:
        self.trunk = trunk
        linears = [linear for layer in trunk.layers for linear in _linears(layer)]
        self._parameters = [p for linear in linears for p in (linear.weight, linear.bias) if p is not None]
        self._fits = all(linear.weight.shape[1] <= MAX_TERMS for linear in linears)
        self._made_from: tuple[object, ...] = ()
        self._layers: list[decoder_layer.Weights] = []

    def layers(self) -> list[decoder_layer.Weights]:
        """The weights of whole layers; empty where the parts of a layer have to be called one by one.

        NumericsError where a weight is not finite.
        """
        kind, threads = backend.active(), pool.threads()
        made_from = (kind, threads, *[(p.data_ptr(), p._version) for p in self._parameters])
        if made_from != self._made_from:
            layers = [_weights(layer) for layer in self.trunk.layers] if kind == "amx" and self._fits else []
            largest = max((sum(matrix.tiles.size for matrix in _matrices(layer)) for layer in layers), default=0)
            self._layers = layers if threads == 1 or largest <= MOST_BYTES else []
            self._made_from = made_from
        return self._layers


def _linears(layer: Layer) -> tuple[Linear, ...]:
    return layer.query, layer.key, layer.value, layer.out, layer.gate, layer.up, layer.down


def _matrices(w: decoder_layer.Weights) -> tuple[decoder_layer.Matrix, ...]:
    return w.query, w.key, w.value, w.out, w.gate, w.up, w.down


def _weights(layer: Layer) -> decoder_layer.Weights:
    query, key, value, out, gate, up, down = map(_matrix, _linears(layer))
    query_norm, key_norm = _norm(layer.query_norm), _norm(layer.key_norm)
    before = _norm(layer.before_attention), _norm(layer.before_mlp)
    return decoder_layer.Weights(before[0], query, key, value, query_norm, key_norm, out, before[1], gate, up, down)


def _norm(norm: Norm | None) -> decoder_layer.Norm:
    return _NO_NORM if norm is None else decoder_layer.Norm(norm.values, norm.eps, operand_bits(len(norm.values)))


def _matrix(linear: Linear) -> decoder_layer.Matrix:
    packed, bias = linear.prepared.packed(linear.weight), product.padded_bias(linear.bias_values)
    return decoder_layer.Matrix(
        packed.tiles, packed.scales, bias, packed.terms, packed.columns, packed.p, packed.digits
    )


@torch.no_grad()
def decode(decoder: Decoder, ids: Tensor, cache: GridCache) -> Tensor:
    """Hidden states [R, H] float32 of ids [R] int64, one token at each place that `cache` aims at.

    The bits are those of the trunk's own forward. Raises NumericsError where a number is not finite.
    """
    trunk, layers = decoder.trunk, decoder.layers()
    x = array(trunk.embedding)[ids.numpy()]
    if layers:
        _through_layers(trunk, layers, x, cache)
    else:
        _through_parts(trunk, x, cache)
    return torch.from_numpy(normed(trunk.last, x)[0])


def _seen(window: int | None, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first key that each query sees, and the one after the last."""
    end = positions + 1
    return (np.zeros_like(end) if window is None else np.maximum(end - window, 0)), end


def _keep(cache: GridCache, layer: Layer, key: np.ndarray, value: np.ndarray) -> None:
    cache.keep(layer.index, *(torch.from_numpy(new).view(len(key), -1, 1, layer.spec.dim) for new in (key, value)))


def _through_layers(trunk: Trunk, weights: Sequence[decoder_layer.Weights], x: np.ndarray, cache: GridCache) -> None:
    """Change x from the embeddings to the last layer's result, some rows on each thread."""
    assert cache.aimed is not None
    slots, positions, valid = (
        t.contiguous().numpy() for t in (cache.aimed.slots, cache.aimed.positions, cache.aimed.valid)
    )
    seen = {window: _seen(window, positions) for window in {layer.window for layer in trunk.layers}}
    tables, rows, spec = (trunk.cosine.reshape(-1), trunk.sine.reshape(-1)), len(x), trunk.layers[0].spec
    new = np.empty((len(weights), 2, rows, spec.kv_heads * spec.dim), np.float32)

    def part(first: int, last: int) -> None:
        own = slice(first, last)
        aimed = slots[own], positions[own], valid[own]
        for layer, w, (key, value) in zip(trunk.layers, weights, new, strict=True):
            places = decoder_layer.NewTokens(*aimed, *[bound[own] for bound in seen[layer.window]])
            held, result = decoder_layer.LayerCache(*cache.arrays[layer.index]), (x[own], key[own], value[own])
            found = decoder_layer.decoder_layer(w, layer.spec, *tables, places, held, *result)
            if found != decoder_layer.FINITE:
                raise NumericsError(_problem(layer, found))

    of_products = PRODUCT_NANOSECONDS * sum(matrix.terms * matrix.columns for w in weights for matrix in _matrices(w))
    of_attention = len(weights) * cost(spec, *seen[trunk.layers[0].window]) / rows
    pool.in_parts(part, rows, of_products + of_attention)
    if cache.keeps:
        for layer, (key, value) in zip(trunk.layers, new, strict=True):
            _keep(cache, layer, key, value)


def _problem(layer: Layer, found: int) -> str:
    norms = {
        decoder_layer.BEFORE_ATTENTION: layer.before_attention,
        decoder_layer.QUERY_NORM: layer.query_norm,
        decoder_layer.KEY_NORM: layer.key_norm,
        decoder_layer.BEFORE_MLP: layer.before_mlp,
    }
    if found == decoder_layer.ATTENTION:
        return f"layer {layer.index}: {NOT_FINITE}"
    norm = norms.get(found)
    if norm is not None:
        return f"the input of {norm.name} is not finite"
    linears = {decoder_layer.QUERY: layer.query, decoder_layer.OUT: layer.out, decoder_layer.GATE: layer.gate}
    return f"the input or the weight of {linears.get(found, layer.down).prepared.name} is not finite"


def _through_parts(trunk: Trunk, x: np.ndarray, cache: GridCache) -> None:
    """As `_through_layers`, part by part, each shared out to the threads by itself."""
    assert cache.aimed is not None, "aim first"
    positions = cache.aimed.positions.numpy()
    for layer in trunk.layers:
        dim = layer.spec.dim
        query, key, value = products((layer.query, layer.key, layer.value), normed(layer.before_attention, x)[0])
        if layer.query_norm is not None and layer.key_norm is not None:
            query = normed(layer.query_norm, query.reshape(-1, dim))[0].reshape(query.shape)
            key = normed(layer.key_norm, key.reshape(-1, dim))[0].reshape(key.shape)
        for rotated in (query, key):
            layer_parts.rotate(rotated, trunk.cosine, trunk.sine, positions[:, 0], dim)
        if cache.keeps:
            _keep(cache, layer, key, value)
        x += products((layer.out,), _attend(layer, query, key, value, cache))[0]
        gate, up = products((layer.gate, layer.up), normed(layer.before_mlp, x)[0])
        x += products((layer.down,), layer_parts.silu_times(gate, up))[0]


def _attend(layer: Layer, query: np.ndarray, key: np.ndarray, value: np.ndarray, cache: GridCache) -> np.ndarray:
    assert cache.aimed is not None
    begin, end = _seen(layer.window, cache.aimed.positions.numpy())
    try:
        return attend_arrays(query, key, value, cache, layer.index, begin, end, layer.spec)
    except NumericsError as error:
        raise NumericsError(f"layer {layer.index}: {error}") from None
