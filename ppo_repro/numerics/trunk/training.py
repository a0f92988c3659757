"""A whole forward pass through the parts of a trunk, and its backward into the gradient accumulators.

What autograd and modules would do, in the same order: the law of every operation, and so every bit, is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.kernels import layer_parts
from ppo_repro.numerics.kernels.amx.product import NO_BIAS
from ppo_repro.numerics.kernels.attention.keys import Saved
from ppo_repro.numerics.layers import fused_attention
from ppo_repro.numerics.layers.attention import visible_keys
from ppo_repro.numerics.layers.fused_attention import Reach
from ppo_repro.numerics.layers.linear import norm_backward
from ppo_repro.numerics.products import array
from ppo_repro.numerics.trunk.weights import Layer, Linear, Norm, Trunk, normed


@dataclass(frozen=True)
class _Places:
    """Where the tokens of a pass stand: ids and positions [T], and by window what each query sees."""

    ids: Tensor
    positions: np.ndarray
    reaches: dict[int | None, Reach]
    predictors: Tensor  # [n], rows whose hidden states are wanted


@dataclass(frozen=True)
class _Normed:
    """A norm's input [n, H], its result and 1 / sqrt(mean(x^2) + eps)."""

    x: np.ndarray
    y: np.ndarray
    inverse: np.ndarray


@dataclass(frozen=True)
class _Input:
    """What a linear layer was given [n, K], and the exponents of its rows, int64 [n]."""

    values: np.ndarray
    exponents: Tensor


@dataclass(frozen=True)
class _Kept:
    """What the backward of a layer needs."""

    rows: np.ndarray | None  # of those after attention; None for all
    before: _Normed
    to_attention: _Input
    query_normed: _Normed | None
    key_normed: _Normed | None
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    result: np.ndarray  # of attention
    attended: _Input
    of_queries: tuple[np.ndarray, np.ndarray]
    between: _Normed
    to_mlp: _Input
    gate: np.ndarray
    up: np.ndarray
    gated: _Input


def hidden_states(
    trunk: Trunk,
    input_ids: Tensor,
    position_ids: Tensor,
    first_key: Tensor,
    predictors: Tensor,
    recompute: bool = False,
) -> Tensor:
    """Final hidden states [n, H] float32 at the flat places `predictors` [n] int64, no two of them the same.

    input_ids, position_ids, first_key [R, L] int64 as in `TokenBatch`. Differentiable: a backward pass sends the
    gradients of what is trained to the accumulators of the layers, once; with `recompute` nothing but the inputs of
    layers is kept for it. Raises NumericsError where a number is not
    finite or a query sees more keys than max_context, IndexError for a position beyond it.
    """
    own = torch.arange(first_key.shape[1]).expand_as(first_key)
    windows = {layer.window: layer.context for layer in trunk.layers}
    reaches = {
        window: fused_attention.reach_of(*visible_keys(first_key, own, window, context))
        for window, context in windows.items()
    }
    if int(position_ids.max()) >= len(trunk.cosine):
        raise IndexError(f"position {int(position_ids.max())}: rotary tables have {len(trunk.cosine)}")
    places = _Places(input_ids.reshape(-1), array(position_ids.reshape(-1)), reaches, predictors)
    trained = next((p for p in _parameters(trunk) if p.requires_grad), None)
    if trained is None or not torch.is_grad_enabled():
        return torch.from_numpy(_forward(trunk, places, None))
    return _Pass.apply(trained, trunk, places, recompute)


def _parameters(trunk: Trunk) -> list[Tensor]:
    """Those that may be trained; a layer without an accumulator has none."""
    found = [trunk.embedding, trunk.last.weight]
    for layer in trunk.layers:
        norms = layer.before_attention, layer.query_norm, layer.key_norm, layer.before_mlp
        found += [norm.weight for norm in norms if norm is not None]
        for linear in (layer.query, layer.key, layer.value, layer.out, layer.gate, layer.up, layer.down):
            found += [p for p in (linear.weight, linear.bias) if p is not None]
    return found


class _Pass(Function):
    """Depends on the trained parameters, of which autograd is shown one; their gradients go to the accumulators."""

    @staticmethod
    def forward(ctx: Any, trained: Tensor, trunk: Trunk, places: _Places, recompute: bool) -> Tensor:
        kept: list[_Kept | np.ndarray | _Normed] = []  # of each layer, or its input; and of the last norm
        hidden = _forward(trunk, places, kept, recompute)
        ctx.trunk, ctx.places, ctx.kept = trunk, places, kept
        return torch.from_numpy(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        if not ctx.kept:
            raise RuntimeError("a second backward through one pass: what it needs was freed")
        _backward(ctx.trunk, ctx.places, ctx.kept, array(grad))
        return None, None, None, None


def _forward(trunk: Trunk, places: _Places, kept: list[Any] | None, recompute: bool = False) -> np.ndarray:
    x = array(trunk.embedding)[places.ids.numpy()]
    for layer in trunk.layers:
        if kept is None:
            x = _layer_forward(layer, x, trunk, places)[0]
            continue
        given = x
        x, of_layer = _layer_forward(layer, given, trunk, places)
        kept.append(given if recompute else of_layer)
    last = _normed(trunk.last, x)
    if kept is not None:
        kept.append(last)
    return last.y


def _normed(norm: Norm, x: np.ndarray) -> _Normed:
    return _Normed(x, *normed(norm, x))


def _layer_forward(layer: Layer, x: np.ndarray, trunk: Trunk, places: _Places) -> tuple[np.ndarray, _Kept]:
    before = _normed(layer.before_attention, x)
    (query, key, value), to_attention = _products((layer.query, layer.key, layer.value), before.y)
    dim, query_normed, key_normed = layer.spec.dim, None, None
    if layer.query_norm is not None and layer.key_norm is not None:
        query_normed = _normed(layer.query_norm, query.reshape(-1, dim))
        key_normed = _normed(layer.key_norm, key.reshape(-1, dim))
        query, key = query_normed.y.reshape(query.shape), key_normed.y.reshape(key.shape)
    for rotated in (query, key):  # nobody needs them as they were
        layer_parts.rotate(rotated, trunk.cosine, trunk.sine, places.positions, dim)
    result, top, total = _attend(layer, places, query, key, value)
    # after the last attention no row looks at another one: those that nobody wants are left out
    rows = places.predictors.numpy() if layer is trunk.layers[-1] else None
    if rows is not None:
        x = x[rows]
    (out,), attended = _products((layer.out,), result if rows is None else result[rows])
    between = _normed(layer.before_mlp, layer_parts.add(x, out))
    (gate, up), to_mlp = _products((layer.gate, layer.up), between.y)
    (down,), gated = _products((layer.down,), layer_parts.silu_times(gate, up))
    kept = _Kept(
        rows, before, to_attention, query_normed, key_normed, query, key, value, result, attended, (top, total),
        between, to_mlp, gate, up, gated,
    )  # fmt: skip
    return layer_parts.add(between.x, down), kept


def _products(layers: Sequence[Linear], x: np.ndarray) -> tuple[list[np.ndarray], _Input]:
    """Of layers that share an input, which is put on its grid once."""
    operand = layers[0].prepared.operand(x)
    results = [layer.prepared.product(operand, layer.weight, 1, layer.bias_values) for layer in layers]
    return results, _Input(x, torch.from_numpy(operand.exponents))


def _attend(
    layer: Layer, places: _Places, query: np.ndarray, key: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = (x.reshape(-1) for x in (query, key, value))
    try:
        out, top, total = fused_attention.forward(q, k, v, places.reaches[layer.window], layer.spec)
    except NumericsError as error:
        raise NumericsError(f"layer {layer.index}: {error}") from None
    return out.reshape(query.shape), top, total


def _backward(trunk: Trunk, places: _Places, kept: list[Any], grad: np.ndarray) -> None:
    """Empties `kept` on the way, so that each layer's memory is free for the one before it."""
    last: _Normed = kept.pop()
    dx = _norm_backward(trunk.last, last, grad)
    for layer in reversed(trunk.layers):
        found = kept.pop()
        of_layer = found if isinstance(found, _Kept) else _layer_forward(layer, found, trunk, places)[1]
        dx = _layer_backward(layer, of_layer, dx, trunk, places)
    if trunk.embedding_accumulator is not None:
        if trunk.padding_idx is not None:  # as in nn.Embedding, this row takes no gradient
            dx[(places.ids == trunk.padding_idx).numpy()] = 0.0
        trunk.embedding_accumulator.add_rows(trunk.embedding, torch.from_numpy(dx), places.ids)


def _layer_backward(layer: Layer, kept: _Kept, grad: np.ndarray, trunk: Trunk, places: _Places) -> np.ndarray:
    d_gated = _linear_backward(layer.down, kept.gated, grad)
    d_gate, d_up = layer_parts.silu_times_backward(d_gated, kept.gate, kept.up)
    d_normed = layer_parts.add(
        _linear_backward(layer.up, kept.to_mlp, d_up), _linear_backward(layer.gate, kept.to_mlp, d_gate)
    )
    d_between = layer_parts.add(grad, _norm_backward(layer.before_mlp, kept.between, d_normed))
    d_result = _linear_backward(layer.out, kept.attended, d_between)
    if kept.rows is not None:
        d_between, d_result = (_among_all(d, kept.rows, len(places.ids)) for d in (d_between, d_result))
    q, k, v, out, d_out = (x.reshape(-1) for x in (kept.query, kept.key, kept.value, kept.result, d_result))
    saved = Saved(q, k, v, out, d_out, *kept.of_queries)
    results = fused_attention.backward(saved, places.reaches[layer.window], layer.spec)
    dq, dk, dv = (d.reshape(x.shape) for d, x in zip(results, (kept.query, kept.key, kept.value), strict=True))
    for rotated in (dq, dk):
        layer_parts.rotate(rotated, trunk.cosine, trunk.sine, places.positions, layer.spec.dim, back=True)
    dq = _head_norm_backward(layer.query_norm, kept.query_normed, dq)
    dk = _head_norm_backward(layer.key_norm, kept.key_normed, dk)
    given = kept.to_attention
    # three sums: in the order in which autograd meets them
    d_normed = layer_parts.add(_linear_backward(layer.value, given, dv), _linear_backward(layer.key, given, dk))
    d_normed = layer_parts.add(d_normed, _linear_backward(layer.query, given, dq))
    return layer_parts.add(d_between, _norm_backward(layer.before_attention, kept.before, d_normed))


def _among_all(x: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Zeros [count, ..] but for the rows given."""
    found = np.zeros((count, x.shape[1]), np.float32)
    found[rows] = x
    return found


def _norm_backward(norm: Norm, kept: _Normed, grad: np.ndarray) -> np.ndarray:
    return norm_backward(grad, kept.x, norm.weight, kept.inverse, norm.accumulator)


def _head_norm_backward(norm: Norm | None, kept: _Normed | None, grad: np.ndarray) -> np.ndarray:
    if norm is None or kept is None:
        return grad
    return _norm_backward(norm, kept, grad.reshape(kept.x.shape)).reshape(grad.shape)


def _linear_backward(layer: Linear, x: _Input, dy: np.ndarray) -> np.ndarray:
    """dy W; the weight and bias gradients go to the accumulator."""
    operand = layer.prepared.operand(dy)
    dx = layer.prepared.product(operand, layer.weight, 0, NO_BIAS)
    if layer.accumulator is not None:
        gradient, exponents = torch.from_numpy(dy), torch.from_numpy(operand.exponents)
        if layer.weight.requires_grad:
            name = layer.accumulator.names[id(layer.weight)]
            layer.accumulator.add_measured(name, torch.from_numpy(x.values), x.exponents, gradient, exponents)
        if layer.bias is not None and layer.bias.requires_grad:
            layer.accumulator.add_rows(layer.bias, gradient)
    return dx
