"""A forward pass over a key/value cache without modules: prompts being read, and one token of each sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.contraction import most_outliers
from ppo_repro.numerics.kernels import decoder_layer, layer_parts
from ppo_repro.numerics.kernels.amx import product
from ppo_repro.numerics.kernels.amx.operands import MAX_TERMS
from ppo_repro.numerics.kernels.core import pool
from ppo_repro.numerics.layers.fused_attention import attend_arrays, cost
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.products import array
from ppo_repro.numerics.trunk.layer import Attended, Rotary, layer_forward, layer_not_finite, normalise, rotary_at
from ppo_repro.numerics.trunk.weights import Layer, LinearWeights, NormWeights, Trunk
from ppo_repro.numerics.trunk.whole import WholeTrunk

# every thread reads all weights of a layer for its rows; larger products are better shared out by their columns
# (two threads, 16 rows: 0.7 of the time by rows with layers of 3 MiB, 1.4 times the time with layers of 42)
MOST_BYTES = 4 << 20
# 16-bit digits of the weights, six bytes each, are kept beside them where that is little: it is in no plan
MOST_DIGIT_BYTES, DIGIT_BYTES = 64 << 20, 6
MANY_ROWS = 8  # from which on the kernels one by one are faster with such layers on one thread too (a tenth, 4x896)
PRODUCT_NANOSECONDS = 0.004  # of a multiplication; only to decide how many threads are worth waking
_NO_NORM = decoder_layer.Norm(np.empty(0, np.float32), 0.0)


class Decoder:
    """A trunk, and its weights as `decoder_layer` takes them, made anew when a weight or the backend changes."""

    def __init__(self, trunk: Trunk) -> None:
        self.trunk = trunk
        linears = [linear for layer in trunk.layers for linear in layer.linears]
        self._parameters = [p for linear in linears for p in (linear.weight, linear.bias) if p is not None]
        self._largest = max(4 * sum(linear.weight.numel() for linear in layer.linears) for layer in trunk.layers)
        size = sum(linear.weight.numel() for linear in linears)
        self._in_digits = self._largest <= MOST_BYTES and DIGIT_BYTES * size <= MOST_DIGIT_BYTES
        self._fits = all(linear.weight.shape[1] <= MAX_TERMS for linear in linears)
        self._made_from: tuple[object, ...] = ()
        self._layers: list[decoder_layer.Weights] = []
        self._whole: WholeTrunk | None = None

    def whole(self, rows: int) -> WholeTrunk | None:
        """The trunk as one call for `rows` on `float64`; None where its kernels have to be called one by one.

        NumericsError where a weight is not finite.
        """
        threads = pool.threads()
        made_from = ("whole", *[(p.data_ptr(), p._version) for p in self._parameters])
        if backend.active() != "float64" or (self._largest > MOST_BYTES and (threads > 1 or rows >= MANY_ROWS)):
            return None
        if self._whole is None or made_from != self._made_from:
            self._whole, self._made_from = WholeTrunk(self.trunk, self._in_digits), made_from
        return self._whole

    def layers(self) -> list[decoder_layer.Weights]:
        """The weights of whole layers; empty where a layer's kernels have to be called one by one.

        NumericsError where a weight is not finite.
        """
        kind, threads = backend.active(), pool.threads()
        made_from = (kind, threads, *[(p.data_ptr(), p._version) for p in self._parameters])
        if made_from != self._made_from:
            whole = kind == "amx" and self._fits and not any(map(_has_outliers, self.trunk.layers))
            layers = [_weights(layer) for layer in self.trunk.layers] if whole else []
            largest = max((sum(matrix.tiles.size for matrix in _matrices(layer)) for layer in layers), default=0)
            self._layers = layers if threads == 1 or largest <= MOST_BYTES else []
            self._made_from = made_from
        return self._layers


def _matrices(w: decoder_layer.Weights) -> tuple[decoder_layer.Matrix, ...]:
    return w.query, w.key, w.value, w.out, w.gate, w.up, w.down


def _has_outliers(layer: Layer) -> bool:
    """Whether a weight has outliers, whose products whole layers do not compute."""
    return any(linear.prepared.packed(linear.weight)[1].any for linear in layer.linears)


def _weights(layer: Layer) -> decoder_layer.Weights:
    query, key, value, out, gate, up, down = map(_matrix, layer.linears)
    query_norm, key_norm = _norm(layer.query_norm), _norm(layer.key_norm)
    attention_norm, mlp_norm = _norm(layer.attention_norm), _norm(layer.mlp_norm)
    return decoder_layer.Weights(attention_norm, query, key, value, query_norm, key_norm, out, mlp_norm, gate, up, down)


def _norm(norm: NormWeights | None) -> decoder_layer.Norm:
    return _NO_NORM if norm is None else decoder_layer.Norm(norm.values, norm.eps)


def _matrix(linear: LinearWeights) -> decoder_layer.Matrix:
    packed, bias = linear.prepared.packed(linear.weight)[0], product.padded_bias(linear.bias_values)
    most = most_outliers(packed.terms)
    return decoder_layer.Matrix(packed.tiles, packed.scales, bias, packed.terms, packed.columns, most)


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
    single = positions.shape[1] == 1
    whole = decoder.whole(len(positions)) if single else None
    layers = decoder.layers() if single and whole is None else []
    if whole is not None:
        _through_whole_trunk(trunk, whole, x, cache)
        x = x if wanted is None else x[wanted]
        return torch.from_numpy(normalise(trunk.final_norm, x).y)
    visible = {window: _visible(window, positions) for window in {layer.window for layer in trunk.layers}}
    if layers:
        _through_whole_layers(trunk, layers, x, cache, visible)
        x = x if wanted is None else x[wanted]
    else:
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


def _through_whole_layers(
    trunk: Trunk,
    weights: Sequence[decoder_layer.Weights],
    x: np.ndarray,
    cache: GridCache,
    visible: dict[int | None, Visible],
) -> None:
    """Change x [R, H] from the embeddings to the last layer's result, some rows on each thread."""
    slots, positions, valid = cache.target.arrays
    tables, rows, spec = (trunk.cosine.reshape(-1), trunk.sine.reshape(-1)), len(x), trunk.layers[0].spec
    new = np.empty((len(weights), 2, rows, spec.kv_heads * spec.dim), np.float32)

    def run(first: int, last: int) -> None:
        own = slice(first, last)
        target = slots[own], positions[own], valid[own]
        for layer, w, (key, value) in zip(trunk.layers, weights, new, strict=True):
            places = decoder_layer.NewTokens(*target, *[bound[own] for bound in visible[layer.window]])
            contents, result = decoder_layer.LayerCache(*cache.arrays[layer.index]), (x[own], key[own], value[own])
            before = x[own].copy()
            status = decoder_layer.decoder_layer(w, layer.spec, *tables, places, contents, *result)
            if status == layer_parts.OUTLIERS:
                x[own] = _again(trunk, layer, before, own, cache, visible, key, value)
            elif status != layer_parts.FINITE:
                raise layer_not_finite(layer, status)

    product_cost = PRODUCT_NANOSECONDS * sum(matrix.terms * matrix.columns for w in weights for matrix in _matrices(w))
    attention_cost = len(weights) * cost(spec, *visible[trunk.layers[0].window]) / rows
    pool.in_parts(run, rows, product_cost + attention_cost)
    if cache.keeps:
        for layer, (key, value) in zip(trunk.layers, new, strict=True):
            _keep(cache, layer, key, value)


def _again(
    trunk: Trunk,
    layer: Layer,
    x: np.ndarray,
    own: slice,
    cache: GridCache,
    visible: dict[int | None, Visible],
    key: np.ndarray,
    value: np.ndarray,
) -> np.ndarray:
    """The result of a layer for some rows, kernel by kernel on this thread; x [n, H] are its inputs.

    The new keys and values are stored once more, with the same bits; key and value [R, Hk D] are set at these rows.
    """
    part, target = copy.copy(cache), cache.target
    part.aim(target.slots[own], target.positions[own], target.valid[own])

    def attend(layer: Layer, query: np.ndarray, new_key: np.ndarray, new_value: np.ndarray) -> Attended:
        key[own], value[own] = new_key, new_value
        begin, end = (bound[own] for bound in visible[layer.window])
        return Attended(attend_arrays(query, new_key, new_value, part, layer.index, begin, end, layer.spec))

    with pool.limited_to(1):
        return layer_forward(layer, x, rotary_at(trunk, part.target.arrays[1][:, 0]), attend)[0]


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
