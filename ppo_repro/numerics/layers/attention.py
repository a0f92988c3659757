"""Exact attention: a query's result depends only on the keys it may see, whatever their order and layout.

Rows lie on grids of a fixed width and sums of products are exact at every length. So neither the current length nor
the longest one changes a bit, and decoding rounds as the full forward does.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.numerics.arithmetic.grid import (
    DOT_BITS,
    LEFT_BITS,
    RIGHT_BITS,
    WEIGHT_UNIT,
    contract,
    exact_dot,
    exact_product,
    quantise,
)
from ppo_repro.numerics.backend import has_kernels
from ppo_repro.numerics.layers import fused_attention
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.layers.precision import Precision
from ppo_repro.numerics.layers.rounded import attention_inputs

IMPLEMENTATION = "ppo_repro_exact"

Grid = tuple[Tensor, Tensor]


def _refuse_not_finite(*numbers: Tensor) -> None:
    if not all(bool(torch.isfinite(x).all()) for x in numbers):
        raise NumericsError(fused_attention.NOT_FINITE)


def _softmax_rows(queries: Grid, keys: Grid, values: Grid, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [.., I, J] float64 and output [.., I, D] float32 of queries over the keys that `mask` shows."""
    scores = contract(queries, keys)
    _refuse_not_finite(scores.masked_fill(~mask, 0.0))
    scores = scores.masked_fill_(~mask, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    # a query that sees no key has maximum -inf; its weights must be 0, not NaN
    top = torch.where(torch.isinf(top), 0.0, top)
    masses = elementwise.exp(scores - top)
    integers = _in_units(masses, mask)
    total = integers.sum(-1, keepdim=True)
    total = torch.where(total > 0, total, 1.0)
    folded, folded_scale = quantise(integers * values[1].transpose(-1, -2), LEFT_BITS)
    out = exact_product(folded, values[0]).mul_(folded_scale).div_(total).to(torch.float32).add_(0.0)
    _refuse_not_finite(out)
    return integers / total, out


def _in_units(masses: Tensor, mask: Tensor) -> Tensor:
    """The nearest integers in WEIGHT_UNIT, 0 where a key is not seen; float64."""
    return (masses.to(torch.float64) * WEIGHT_UNIT).round_().masked_fill_(~mask, 0.0)


class _Attention(Function):
    """o_i = sum_j w_ij v_j, w = softmax(q k^T scaling) over visible keys.

    q [B, H, I, D], k and v [B, Hk, J, D] float32, visible [B or 1, 1, I, J] bool -> [B, H, I, D] float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scaling: float) -> Tensor:
        b, h, i, d = q.shape
        kv_heads, j = k.shape[1], k.shape[2]
        groups = h // kv_heads
        rows = (q * scaling).reshape(b, kv_heads, groups * i, d)
        qg = quantise(rows, LEFT_BITS, where="attention")
        kg, vg = (quantise(x, RIGHT_BITS, where="attention") for x in (k, v))
        mask = visible.expand(b, 1, i, j).repeat(1, 1, groups, 1)
        weights, out = _softmax_rows(qg, kg, vg, mask)
        ctx.save_for_backward(rows, *kg, *vg, weights, out)
        ctx.scaling, ctx.shapes = scaling, (q.shape, k.shape)
        return out.view(b, h, i, d)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, k_int, k_scale, v_int, v_scale, weights, out = ctx.saved_tensors
        q_shape, k_shape = ctx.shapes
        query_rows = grad.reshape(out.shape)
        dg = quantise(query_rows, LEFT_BITS, where="the gradient of attention")
        og = quantise(out, DOT_BITS)
        dp = exact_product(dg[0], v_int.transpose(-1, -2)).mul_(dg[1]).mul_(v_scale.transpose(-1, -2))
        delta = exact_dot(dg[0], og[0]) * dg[1] * og[1]
        ds = (dp - delta).mul_(weights)
        a, scale = quantise(ds * k_scale.transpose(-1, -2), LEFT_BITS)
        dq = exact_product(a, k_int).mul_(scale).mul_(ctx.scaling)
        dk, dv = _key_gradient(ds, rows), _key_gradient(weights, query_rows)
        # adding zero fixes the sign of zero: a matrix product of one term may give a negative zero
        dq, dk, dv = (x.to(torch.float32).add_(0.0) for x in (dq, dk, dv))
        _refuse_not_finite(dq, dk, dv)
        return dq.view(q_shape), dk.view(k_shape), dv.view(k_shape), None, None


def _key_gradient(factors: Tensor, rows: Tensor) -> Tensor:
    """sum_i factors[.., i, j] rows[.., i, d], float64 [.., J, D].

    The wider grid is that of a key's factors: the largest may lie far above the others, which are many.
    """
    integers, row_scale = quantise(rows, RIGHT_BITS)
    folded, scale = quantise((factors * row_scale).transpose(-1, -2), LEFT_BITS)
    return exact_product(folded, integers).mul_(scale)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """softmax(q k^T scaling) v over the keys that `visible` shows; differentiable in q, k and v.

    q [B, H, I, D], k and v [B, Hk, J, D] float32, visible [B or 1, 1, I, J] bool -> [B, H, I, D] float32.
    A query that sees no key gives zeros.
    """
    return _Attention.apply(q, k, v, visible, scaling)


def visible_keys(first_key: Tensor, last_key: Tensor, window: int | None, context: int) -> tuple[Tensor, Tensor]:
    """Query i of row r sees keys begin[r, i]..end[r, i]-1, int64 [R, L]: the last `window` up to last_key[r, i].

    Raises NumericsError where a query sees more keys than `context`, for which tables and memory are made.
    """
    end = last_key + 1
    begin = first_key.clamp(min=0) if window is None else torch.maximum(first_key, end - window).clamp_(min=0)
    most = int((end - begin).max())
    if most > context:
        raise NumericsError(f"a query sees {most} keys; numerics.max_context = {context} allows no more")
    return begin, end


def _mask(begin: Tensor, end: Tensor, keys: int) -> Tensor:
    """bool [R, 1, L, keys] of the keys begin..end-1."""
    columns = torch.arange(keys, device=begin.device)
    return ((columns >= begin[..., None]) & (columns < end[..., None]))[:, None]


def reach(first_key: Tensor, window: int | None) -> Tensor:
    """bool [R, 1, L, L]: query i sees keys first_key[i]..i of its row, at most the last `window` of them."""
    length = first_key.shape[1]
    own = torch.arange(length, device=first_key.device)
    return _mask(*visible_keys(first_key, own, window, length), length)


def cached_reach(positions: Tensor, window: int | None) -> Tensor:
    """bool [R, 1, L, J]: queries at `positions` [R, L] see cached keys 0..position, at most the last `window`."""
    keys = int(positions.max()) + 1
    return _mask(*visible_keys(torch.zeros_like(positions), positions, window, keys), keys)


def attend_cached(q: Tensor, cache: GridCache, layer: int, begin: Tensor, end: Tensor, scaling: float) -> Tensor:
    """Queries [R, H, L, D] over positions begin..end-1 [R, L] of the slots in the target of `cache` -> [R, H, L, D]."""
    keys, values, scales = cache.read(layer)
    r, h, length, d = q.shape
    groups = h // keys.shape[1]
    rows = (q * scaling).reshape(r, keys.shape[1], groups * length, d)
    queries = quantise(rows, LEFT_BITS, where="attention")
    mask = _mask(begin, end, keys.shape[2]).repeat(1, 1, groups, 1)
    one = torch.ones(1, 1, device=q.device, dtype=torch.float64)
    out = _softmax_rows(queries, (keys, one), (values, scales), mask)[-1]
    return out.view(r, h, length, d)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    first_key: Tensor | None = None,
    kv_cache: GridCache | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls for IMPLEMENTATION.

    Which keys are visible follows from `first_key` [R, L] int64 (see `reach`) or from the target of `kv_cache`;
    exactly one of them is passed to the model's forward. Raises TypeError for a mask or any option not known here,
    NumericsError where a query sees more keys than max_context or a number is not finite.
    """
    unsupported = {name for name in ("dropout", "softcap") if options.get(name)}
    if attention_mask is not None or (first_key is None) == (kv_cache is None):
        raise TypeError("exact attention takes first_key or kv_cache, and no mask")
    if unsupported:
        raise TypeError(f"exact attention does not know {', '.join(sorted(unsupported))}")
    layer, context = cast(int, module.layer_idx), cast(int, module.max_context)
    precision = cast(Precision | None, getattr(module, "precision", None))
    if precision is not None:
        query, key, value = attention_inputs(precision, query, key, value)
    try:
        if kv_cache is not None:
            out = _cached(query, key, value, kv_cache, layer, scaling, context, sliding_window)
        else:
            assert first_key is not None
            out = _uncached(query, key, value, first_key, scaling, context, sliding_window)
    except NumericsError as error:
        raise NumericsError(f"layer {layer}: {error}") from None
    return out.transpose(1, 2).contiguous(), None


def _cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: GridCache,
    layer: int,
    scaling: float,
    context: int,
    window: int | None,
) -> Tensor:
    positions = cache.target.positions
    begin, end = visible_keys(torch.zeros_like(positions), positions, window, context)
    cache.keep(layer, k, v)
    if has_kernels(q):
        return fused_attention.attend_cached(q, k, v, cache, layer, begin, end, scaling)
    cache.write(layer, k, v)
    return attend_cached(q, cache, layer, begin, end, scaling)


def _uncached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: Tensor,
    scaling: float,
    context: int,
    window: int | None,
) -> Tensor:
    length = first_key.shape[1]
    begin, end = visible_keys(first_key, torch.arange(length, device=q.device).expand_as(first_key), window, context)
    if has_kernels(q):
        return fused_attention.attend(q, k, v, begin, end, scaling)
    return attend(q, k, v, _mask(begin, end, length), scaling)
