"""A trunk whose layers are one call of a kernel for one new token of each row, by products in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ppo_repro.numerics.arithmetic.contraction import most_outliers
from ppo_repro.numerics.arithmetic.grid import WEIGHT_BITS
from ppo_repro.numerics.kernels import decoder_trunk as decoder
from ppo_repro.numerics.kernels import layer_parts
from ppo_repro.numerics.kernels.core import pool
from ppo_repro.numerics.kernels.float64 import digits
from ppo_repro.numerics.kernels.float64.digit_rows import MOST_TERMS, weight_digits
from ppo_repro.numerics.kernels.float64.tiles import COLUMNS
from ppo_repro.numerics.layers.fused_attention import cost
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.products import array
from ppo_repro.numerics.trunk.layer import layer_not_finite
from ppo_repro.numerics.trunk.weights import Layer, LinearWeights, Trunk

PRODUCT_NANOSECONDS = 0.02  # of a multiplication; only to decide how many threads are worth waking


class WholeTrunk:
    """Addresses of the weights of a trunk, and of a cache, as the kernel takes them; for unchanged weights."""

    def __init__(self, trunk: Trunk, in_digits: bool) -> None:
        """`in_digits`: weights as 16-bit digits too, half as large again, which are faster for some rows."""
        fits = all(linear.weight.shape[1] <= MOST_TERMS for layer in trunk.layers for linear in layer.linears)
        self._in_digits = in_digits and digits.IN_USE and fits
        self._trunk, self._kept = trunk, list[np.ndarray]()  # what addresses belong to
        self._fields = np.zeros((len(trunk.layers), decoder.FIELDS), np.int64)
        for layer in trunk.layers:
            self._point(layer)
        windows = list(dict.fromkeys(layer.window for layer in trunk.layers))
        self._windows, self._window_of = windows, np.array([windows.index(layer.window) for layer in trunk.layers])
        self._tables = trunk.cosine.reshape(-1), trunk.sine.reshape(-1)
        self._cache: GridCache | None = None
        self._shape: decoder.Shape | None = None

    def _point(self, layer: Layer) -> None:
        fields = self._fields[layer.index]
        for index, linear in enumerate(layer.linears):
            at = decoder.QUERY_AT + index * (decoder.KEY_AT - decoder.QUERY_AT)
            fields[at : at + 6] = [self._address(part) for part in _matrix(linear)]
            fields[decoder.OUTLIERS_AT + index] = linear.prepared.panels(linear.weight)[1].columns.size
            if self._in_digits:
                packed = weight_digits(linear.prepared.panels(linear.weight)[0], linear.weight.shape[1])
                at = decoder.DIGITS_AT + 2 * index
                fields[at : at + 2] = [self._address(part) for part in packed]
        norms = {
            decoder.ATTENTION_NORM_AT: layer.attention_norm,
            decoder.QUERY_NORM_AT: layer.query_norm,
            decoder.KEY_NORM_AT: layer.key_norm,
            decoder.MLP_NORM_AT: layer.mlp_norm,
        }
        for at, norm in norms.items():
            fields[at] = 0 if norm is None else self._address(norm.values)

    def _address(self, part: np.ndarray) -> int:
        assert part.flags.c_contiguous
        self._kept.append(part)
        return part.ctypes.data

    def _look_at(self, cache: GridCache) -> decoder.Shape:
        """The shape of all layers, with the addresses of this cache set."""
        if self._shape is None or cache is not self._cache:
            first = decoder.KEYS_AT
            for layer, stores in zip(self._trunk.layers, cache.arrays, strict=True):
                self._fields[layer.index, first : first + 3] = [store.ctypes.data for store in stores]
            self._cache, self._shape = cache, _shape(self._trunk.layers[0], cache)
        return self._shape

    def run(self, x: np.ndarray, cache: GridCache) -> np.ndarray | None:
        """Change x [R, H] from the embeddings to the last layer's result, some rows on each thread.

        Returns new keys and values [L, 2, R, Hk D] where the cache keeps them. NumericsError where a number is not
        finite.
        """
        shape, (slots, positions, valid) = self._look_at(cache), cache.target.arrays
        end = positions[:, 0] + 1
        count, width = len(self._fields) if cache.keeps else 1, shape.spec.kv_heads * shape.spec.dim
        new = np.empty((count, 2, len(x), width), np.float32)

        def part(first: int, last: int) -> None:
            own = slice(first, last)
            begin = np.stack([_first_key(end[own], window) for window in self._windows])
            tokens = decoder.NewTokens(slots[own], positions[own], valid[own], begin, end[own])
            mine = np.empty((count, 2, (last - first) * width), np.float32)
            index, status = decoder.run(self._fields, self._window_of, shape, *self._tables, tokens, x[own], mine)
            if status != layer_parts.FINITE:
                raise layer_not_finite(self._trunk.layers[index], status)
            if cache.keeps:
                new[:, :, own] = mine.reshape(count, 2, last - first, width)

        products = sum(linear.weight.numel() for linear in self._trunk.layers[0].linears)
        nanoseconds = PRODUCT_NANOSECONDS * products + cost(shape.spec, _first_key(end, self._windows[0]), end) / len(x)
        pool.in_parts(part, len(x), len(self._fields) * nanoseconds)
        return new if cache.keeps else None


def _first_key(end: np.ndarray, window: int | None) -> np.ndarray:
    """The first key that each query sees, given the one after the last."""
    return np.zeros_like(end) if window is None else np.maximum(end - window, 0)


def _matrix(linear: LinearWeights) -> Sequence[np.ndarray]:
    """The fields of a matrix, in their order; scales and bias are padded to whole panels."""
    packed, outliers = linear.prepared.panels(linear.weight)
    columns = linear.weight.shape[0]
    padded = -(-columns // COLUMNS) * COLUMNS
    scales, bias = np.zeros(padded), np.zeros(padded, np.float32)
    scales[:columns] = np.ldexp(1.0, packed.exponents - WEIGHT_BITS)
    bias[: linear.bias_values.size] = linear.bias_values
    return packed.panels, scales, bias, array(linear.weight), outliers.starts, outliers.columns


def _shape(layer: Layer, cache: GridCache) -> decoder.Shape:
    """What all layers have in common; without a norm of heads its eps is not used."""
    hidden, wide = layer.gate.weight.shape[1], layer.gate.weight.shape[0]
    query_eps, key_eps = (0.0 if norm is None else norm.eps for norm in (layer.query_norm, layer.key_norm))
    keys, values, _ = cache.arrays[0]
    return decoder.Shape(
        spec=layer.spec,
        hidden=hidden,
        wide=wide,
        attention_eps=layer.attention_norm.eps,
        query_eps=query_eps,
        key_eps=key_eps,
        mlp_eps=layer.mlp_norm.eps,
        most_hidden=most_outliers(hidden),
        most_attended=most_outliers(layer.out.weight.shape[1]),
        most_wide=most_outliers(wide),
        slots=keys.shape[0],
        panels=keys.shape[2],
        context=values.shape[2],
        values_row=values.shape[3],
    )
