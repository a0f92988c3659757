"""Compute rule 4, attention: scores, softmax and mixed values of each head, and their gradients.

Scores and mixed values follow rule 1, over head_dim and over key positions. The sum of p follows rule 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, F, exp32
from ppo_repro.numerics.definition.gradients import Contributions, blocks_of
from ppo_repro.numerics.definition.linear import layer_linear, linear_backward
from ppo_repro.numerics.definition.model import Layer, Model, NormWeights
from ppo_repro.numerics.definition.product import chain, product
from ppo_repro.numerics.definition.rounding import rounded
from ppo_repro.numerics.definition.row_sums import row_sum
from ppo_repro.numerics.definition.rows import Normed, norm, norm_backward, rotate, soft_cap, soft_cap_slope


@dataclass(frozen=True)
class Attention:
    """Intermediate results of attention.

    Rotated queries [heads, T, D], keys and values [kv_heads, T, D]; and for each query its output, largest score and
    sum.
    """

    q: Array
    k: Array
    v: Array
    out: Array  # [heads, T, D]
    top: Array  # [heads, T, 1]
    total: Array  # [heads, T, 1]


def visible(positions: int, window: int) -> Array:
    """Return whether query t sees key j, bool [T, T]: all keys up to t, or the last `window` of these."""
    t, j = np.arange(positions)[:, None], np.arange(positions)
    return (j <= t) & ((j > t - window) | (window == 0))


def each_head(x: Array, like: Array) -> Array:
    """Repeat the heads of keys or values [kv_heads, T, D] for the query heads that share them."""
    return np.repeat(x, len(like) // len(x), 0)


def scores_of(layer: Layer, q: Array, k_each: Array) -> Array:
    """Return the scores [heads, T, T] of queries and keys [heads, T, D]: scale q.k, then the soft cap."""
    return soft_cap(product(q, k_each) * F(layer.scale), layer.score_cap)


def attend(layer: Layer, q: Array, k: Array, v: Array) -> Attention:
    """Compute rule 4: out = (sum_j p v) / float32(sum_j p) with p = exp(score - largest), or 0 for an unseen key.

    All sums run over key positions from 0 on: products in blocks of 128, the sum of p in 16 lanes. Kernel: `attend`.

    Args:
        layer: window, scale and soft cap of the scores.
        q: [heads, T, D].
        k: [kv_heads, T, D].
        v: [kv_heads, T, D].
    """
    v_each = each_head(v, q)
    scores, seen = scores_of(layer, q, each_head(k, q)), visible(q.shape[1], layer.window)
    top = np.where(seen, scores, -np.inf).max(-1, keepdims=True).astype(F)
    p = np.where(seen, exp32(scores - top), F(0))
    total = row_sum(p).astype(F)[..., None]
    return Attention(q, k, v, product(p, v_each.swapaxes(-1, -2)) / total, top, total)


def attend_backward(layer: Layer, of: Attention, d_out: Array) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv from ds = p (d_out.v - delta) slope, with delta = float32(out . d_out).

    p = exp(..) (1 / total), and the slope is the soft cap's. dq = (sum_j ds k) scale over blocks of key positions.
    dk = (sum_t ds q) scale and dv = sum_t p d_out are sums over the heads that share a key, head after head, and in
    each head over blocks of query positions. Kernel: `attend_backward`.

    Args:
        layer: window, scale and soft cap of the scores.
        of: the result of `attend`.
        d_out: [heads, T, D].
    """
    k, v, seen = each_head(of.k, of.q), each_head(of.v, of.q), visible(of.q.shape[1], layer.window)
    scores, scale = scores_of(layer, of.q, k), layer.scale
    p = np.where(seen, exp32(scores - of.top) * (F(1) / of.total), F(0))
    delta = row_sum(of.out, d_out).astype(F)[..., None]
    ds = np.where(seen, p * (product(d_out, v) - delta) * soft_cap_slope(scores, layer.score_cap), F(0))
    dq = product(ds, k.swapaxes(-1, -2)) * F(scale)
    return dq, _over_queries(ds, of.q, len(of.k)) * F(scale), _over_queries(p, d_out, len(of.k))


def _over_queries(x: Array, y: Array, kv_heads: int) -> Array:
    """Sum x[h, t, j] y[h, t, d] over the heads h of each group and the queries t; [kv_heads, T, D]."""
    x, y = (a.reshape(kv_heads, -1, *a.shape[1:]) for a in (x, y))
    total = np.zeros((kv_heads, x.shape[3], y.shape[3]), F)
    for head in range(x.shape[1]):
        for rows in blocks_of(np.arange(x.shape[2])):
            total = total + chain(x[:, head, rows].swapaxes(-1, -2), y[:, head, rows].swapaxes(-1, -2))
    return total


def columns_of_heads(at: int, step: int, heads: int, head_dim: int) -> Array:
    """Return the columns of each head in a row of qkv, [heads, head_dim].

    Args:
        at: column of the first head.
        step: columns from one head to the next.
        heads: number of heads.
        head_dim: columns of a head.
    """
    return at + np.arange(heads)[:, None] * step + np.arange(head_dim)


@dataclass(frozen=True)
class AttentionPart:
    """Intermediate results of the attention part of a layer.

    Input x [T, H] of the qkv layer, norms of queries and keys (or None), attention, rows of its outputs [T, heads D].
    """

    x: Array
    q_normed: Normed | None
    k_normed: Normed | None
    attention: Attention
    mixed: Array


def _head_columns(model: Model) -> tuple[Array, Array, Array]:
    d = model.head_dim
    return (
        columns_of_heads(model.q_at, model.q_step, model.heads, d),
        columns_of_heads(model.k_at, model.k_step, model.kv_heads, d),
        columns_of_heads(model.v_at, model.v_step, model.kv_heads, d),
    )


def _norm_heads(model: Model, x: Array, weights: NormWeights | None) -> tuple[Array, Normed | None]:
    """Norm queries or keys [T, heads, D]: each head, or all heads as one row."""
    if weights is None:
        return x, None
    normed = norm(model.head_norm, x.reshape(len(x), -1, len(weights.w)), weights, model.eps)
    return normed.y.reshape(x.shape), normed


def attention_part(model: Model, layer: Layer, x: Array) -> tuple[Array, AttentionPart]:
    """Apply qkv layer, norms, rotation, attention and output layer to normed rows x [T, H]. Kernel: `layer_forward`."""
    r = model.rounding
    x = rounded(r.inputs, x)
    raw, (q_columns, k_columns, v_columns) = layer_linear(model, x, layer.qkv), _head_columns(model)
    q, q_normed = _norm_heads(model, raw[:, q_columns], layer.q_norm)
    k, k_normed = _norm_heads(model, raw[:, k_columns], layer.k_norm)
    if layer.rotary is not None:
        q, k = rotate(q, layer.rotary), rotate(k, layer.rotary)
    q, k = (rounded(r.activations, a, scaled=False) for a in (q, k))
    k, v = (rounded(r.cache, a, scaled=False) for a in (k, raw[:, v_columns]))
    q, k, v = (a.swapaxes(0, 1) for a in (q, k, v))
    attention = attend(layer, q, k, v)
    mixed = rounded(r.inputs, rounded(r.activations, attention.out.swapaxes(0, 1).reshape(len(x), -1)))
    return layer_linear(model, mixed, layer.out), AttentionPart(x, q_normed, k_normed, attention, mixed)


def attention_part_backward(
    grads: Contributions, name: str, model: Model, layer: Layer, dy: Array, of: AttentionPart, position: Array
) -> Array:
    """Return the gradient of x in `attention_part`, [T, H]. Kernel: `layer_backward`.

    Args:
        grads: receives the addends of weights and biases.
        name: name of the layer, a prefix in `grads`.
        model: shapes.
        layer: weights.
        dy: [T, H].
        of: the result of `attention_part`.
        position: [T], position of each row.
    """
    d_mixed = linear_backward(grads, f"{name}.out", layer.out, dy, of.mixed, position)
    d_out = d_mixed.reshape(len(dy), model.heads, model.head_dim).swapaxes(0, 1)
    d_heads = attend_backward(layer, of.attention, d_out)
    dq, dk, dv = (a.swapaxes(0, 1) for a in d_heads)
    if layer.rotary is not None:
        dq, dk = rotate(dq, layer.rotary, way=-1), rotate(dk, layer.rotary, way=-1)
    if of.q_normed is not None and of.k_normed is not None:
        kind = model.head_norm
        dq = _norm_heads_backward(grads, f"{name}.q_norm", kind, layer.q_norm, dq, of.q_normed, position)
        dk = _norm_heads_backward(grads, f"{name}.k_norm", kind, layer.k_norm, dk, of.k_normed, position)
    d_raw = np.zeros((len(dy), len(layer.qkv.w)), F)
    for columns, d in zip(_head_columns(model), (dq, dk, dv), strict=True):
        d_raw[:, columns] = d
    return linear_backward(grads, f"{name}.qkv", layer.qkv, d_raw, of.x, position)


def _norm_heads_backward(
    grads: Contributions, name: str, kind: str, weights: NormWeights | None, dy: Array, of: Normed, position: Array
) -> Array:
    assert weights is not None
    return norm_backward(grads, name, kind, weights, dy.reshape(of.y.shape), of, position).reshape(dy.shape)
