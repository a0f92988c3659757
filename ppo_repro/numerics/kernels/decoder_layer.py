"""A whole decoder layer for one new token of each row, in one call, on AMX.

It calls the kernels of the single operations in their order, so it gives their bits. Called one by one from Python, the
kernels of a small model take no longer than the calls themselves, and each is too short to be worth waking a second
thread; all of them together are worth one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.kernels.amx.operands import fill_tiles
from ppo_repro.numerics.kernels.amx.product import CONFIGURATIONS, multiply_blocks
from ppo_repro.numerics.kernels.amx.tiles import A_SIZE
from ppo_repro.numerics.kernels.attention.block import Spec
from ppo_repro.numerics.kernels.attention.forward import forward_cached, store
from ppo_repro.numerics.kernels.core.compile import inline, kernel
from ppo_repro.numerics.kernels.core.memory import LINE, align_to_line
from ppo_repro.numerics.kernels.core.scalar import INFINITY_BITS
from ppo_repro.numerics.kernels.layer_parts import (
    ATTENTION,
    BEFORE_ATTENTION,
    BEFORE_MLP,
    DOWN,
    FINITE,
    GATE,
    KEY_NORM,
    OUT,
    OUTLIERS,
    QUERY,
    QUERY_NORM,
    rotate_rows,
    silu_times_flat,
)
from ppo_repro.numerics.kernels.norms import rms_norm_rows


class Norm(NamedTuple):
    weight: np.ndarray  # [size] float32; empty where there is no norm
    eps: float


class Matrix(NamedTuple):
    """The fields of an `operands.PackedWeight` without outliers, and the bias padded to a multiple of 16, or empty."""

    tiles: np.ndarray
    scales: np.ndarray
    bias: np.ndarray
    terms: int
    columns: int
    most: int  # outliers in a row of inputs


class Weights(NamedTuple):
    """All weights of a layer, in the order of their use."""

    before_attention: Norm
    query: Matrix
    key: Matrix
    value: Matrix
    query_norm: Norm
    key_norm: Norm
    out: Matrix
    before_mlp: Norm
    gate: Matrix
    up: Matrix
    down: Matrix


class LayerCache(NamedTuple):
    """The cached keys and values of this layer, see `attention.forward.forward_cached`."""

    keys: np.ndarray
    values: np.ndarray
    scales: np.ndarray


class NewTokens(NamedTuple):
    """The new token of each row; it sees keys begin..end-1."""

    slots: np.ndarray  # [R] int64
    positions: np.ndarray  # [R, 1] int64
    valid: np.ndarray  # [R, 1] bool
    begin: np.ndarray  # [R, 1] int64
    end: np.ndarray  # [R, 1] int64


# These are inlined into `_layer`: kernels of their own would be compiled by themselves and once more within it.


@inline
def _operand(x, rows, matrix, place):  # type: ignore[no-untyped-def]
    """Flat x [rows, terms] as tiles of an A operand, their scales, and FINITE, `place` or OUTLIERS."""
    terms = x.size // rows
    blocks, row_blocks = (terms + 63) >> 6, (rows + 15) >> 4
    tiles = align_to_line(np.empty(row_blocks * blocks * A_SIZE + LINE, np.int8))
    scales, exponents, outliers = np.empty(row_blocks * 16), np.empty(rows, np.int64), np.zeros(rows, np.bool_)
    status = place
    if fill_tiles(x, terms, matrix.most, 0, rows, tiles, scales, exponents, outliers):
        status = OUTLIERS if np.any(outliers) else FINITE
    return tiles, scales, status


@inline
def _product_into(palettes, matrix, tiles, scales, rows, y):  # type: ignore[no-untyped-def]
    """fl32(sum of x w on their grids) + 0 [+ bias] into flat y [rows, columns]."""
    blocks = (matrix.terms + 63) >> 6
    row_blocks, column_blocks = (rows + 15) >> 4, (matrix.columns + 15) >> 4
    multiply_blocks(
        palettes[min(16, rows)], tiles, scales, matrix.tiles, matrix.scales, matrix.bias, blocks,
        0, row_blocks, 0, column_blocks, rows, matrix.columns, y,
    )  # fmt: skip


@inline
def _product(palettes, matrix, tiles, scales, rows):  # type: ignore[no-untyped-def]
    """`_product_into` a new array."""
    y = np.empty(rows * matrix.columns, np.float32)
    _product_into(palettes, matrix, tiles, scales, rows, y)
    return y


@inline
def _normed(norm, x):  # type: ignore[no-untyped-def]
    """The norm of each row of flat x, and whether x is finite."""
    y, rows = np.empty(x.size, np.float32), x.size // norm.weight.size
    finite = rms_norm_rows(x, x.view(np.int32), norm.weight, norm.eps, 0, rows, np.empty(rows), y)
    return y, finite


@inline
def _add(x, y):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        x[i] = x[i] + y[i]


@inline
def _attention(palettes, w, spec, cosine, sine, tokens, cache, x, key, value):  # type: ignore[no-untyped-def]
    """x += attention, in place. Sets `key` and `value` to the new keys and values. Returns how it ended."""
    rows = tokens.slots.size
    y, finite = _normed(w.before_attention, x)
    if not finite:
        return BEFORE_ATTENTION
    tiles, scales, status = _operand(y, rows, w.query, QUERY)
    if status != FINITE:
        return status
    query = _product(palettes, w.query, tiles, scales, rows)
    _product_into(palettes, w.key, tiles, scales, rows, key)
    _product_into(palettes, w.value, tiles, scales, rows, value)
    if w.query_norm.weight.size > 0:
        query, finite = _normed(w.query_norm, query)
        if not finite:
            return QUERY_NORM
        y, finite = _normed(w.key_norm, key)
        if not finite:
            return KEY_NORM
        for i in range(key.size):
            key[i] = y[i]
    positions = tokens.positions[:, 0]
    rotate_rows(query, cosine, sine, positions, spec.heads, spec.dim, 0, rows)
    rotate_rows(key, cosine, sine, positions, spec.kv_heads, spec.dim, 0, rows)
    slots = tokens.slots
    store(0, rows, spec, slots, tokens.positions, tokens.valid, key, value, cache.keys, cache.values, cache.scales)
    y = np.empty(query.size, np.float32)
    worst = forward_cached(
        0, rows * spec.kv_heads, spec, query, slots, tokens.begin, tokens.end,
        cache.keys, cache.values, cache.scales, y,
    )  # fmt: skip
    if worst >= INFINITY_BITS:
        return ATTENTION
    tiles, scales, status = _operand(y, rows, w.out, OUT)
    if status != FINITE:
        return status
    _add(x, _product(palettes, w.out, tiles, scales, rows))
    return FINITE


@inline
def _mlp(palettes, w, x, rows):  # type: ignore[no-untyped-def]
    """x += down(silu(gate) up), in place. Returns how it ended."""
    y, finite = _normed(w.before_mlp, x)
    if not finite:
        return BEFORE_MLP
    tiles, scales, status = _operand(y, rows, w.gate, GATE)
    if status != FINITE:
        return status
    gate = _product(palettes, w.gate, tiles, scales, rows)
    up = _product(palettes, w.up, tiles, scales, rows)
    y = np.empty(gate.size, np.float32)
    silu_times_flat(gate, up, y)
    tiles, scales, status = _operand(y, rows, w.down, DOWN)
    if status != FINITE:
        return status
    _add(x, _product(palettes, w.down, tiles, scales, rows))
    return FINITE


@kernel
def _layer(palettes, w, spec, cosine, sine, tokens, cache, x, key, value):  # type: ignore[no-untyped-def]
    status = _attention(palettes, w, spec, cosine, sine, tokens, cache, x, key, value)
    if status != FINITE:
        return status
    return _mlp(palettes, w, x, tokens.slots.size)


def decoder_layer(
    weights: Weights,
    spec: Spec,
    cosine: np.ndarray,
    sine: np.ndarray,
    tokens: NewTokens,
    cache: LayerCache,
    x: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
) -> int:
    """Apply a layer to x [R, H] float32, in place, on the calling thread. Returns FINITE, or how else it ended.

    Attention with rotary tables cosine and sine [P, D], flat, then a gated MLP, each after its norm. The new keys and
    values [R, Hk D] are stored in the cache on their grids, and in `key` and `value` as float32. If it does not return
    FINITE, any of these may have changed.
    """
    flat = x.reshape(-1), key.reshape(-1), value.reshape(-1)
    return int(_layer(CONFIGURATIONS, weights, spec, cosine, sine, tokens, cache, *flat))
