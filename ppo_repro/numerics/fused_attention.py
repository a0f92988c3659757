"""Exact attention by kernels: torch tensors on a CPU to flat NumPy arrays and back, over all threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.errors import NumericsError
from ppo_repro.kernels import attention as forward_kernels
from ppo_repro.kernels import attention_backward as backward_kernels
from ppo_repro.kernels import pool
from ppo_repro.kernels.attention_block import Spec, cut_spans
from ppo_repro.kernels.attention_keys import Saved
from ppo_repro.numerics.grid import folded_bits, operand_bits
from ppo_repro.numerics.kv_cache import GridCache

NOT_FINITE = "attention is not finite: weights or inputs have left the range of float32"
_INFINITY_BITS = 0x7F800000
_KEPT = 2**18  # weights, and as many score gradients: 4 MiB, about what a cache holds
_LEAST_SPAN = 64  # positions; fewer are not worth a block of queries of their own
_BACKWARD_COST = 3.5  # times the forward; like all costs here, only to know how many threads are worth waking


def _flat(x: Tensor) -> np.ndarray:
    """[R, H, L, D] as flat [R, L, H, D]: no copy of what transformers makes of a projection."""
    if x.dtype != torch.float32:
        raise TypeError(f"exact attention takes float32, not {x.dtype}")
    return x.detach().transpose(1, 2).contiguous().numpy().reshape(-1)


def _spec(q: Tensor, kv_heads: int, scaling: float, context: int) -> Spec:
    return spec_of(q.shape[1], kv_heads, q.shape[3], scaling, context)


def spec_of(heads: int, kv_heads: int, dim: int, scaling: float, context: int) -> Spec:
    """The sizes and grids of an attention whose queries see up to `context` keys."""
    key_bits, query_bits = folded_bits(context), folded_bits(context * (heads // kv_heads))
    return Spec(heads, kv_heads, dim, float(scaling), operand_bits(dim), key_bits, query_bits, _KEPT)


def _in_parts(kernel: Callable[[int, int], int], rows: int, nanoseconds: float) -> None:
    """Run a kernel that returns the bits of the largest magnitude it met; NumericsError if that is not finite."""

    def part(begin: int, end: int) -> None:
        if kernel(begin, end) >= _INFINITY_BITS:
            raise NumericsError(NOT_FINITE)

    pool.in_parts(part, rows, nanoseconds / rows)


def _cost(spec: Spec, begin: np.ndarray, end: np.ndarray) -> float:
    """Nanoseconds of a forward: two products and an exponential for every key that a query sees."""
    return float(np.maximum(end - begin, 0).sum()) * spec.heads * (0.07 * spec.dim + 3.0)


class _Attention(Function):
    """As the reference in `attention`; the backward makes the weights again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, scaling: float, context: int
    ) -> Tensor:
        (r, h, length, d), kv_heads = q.shape, k.shape[1]
        spec = _spec(q, kv_heads, scaling, context)
        spans, first, last = cut_spans(begin.numpy(), end.numpy(), _LEAST_SPAN)
        queries, keys, values = _flat(q), _flat(k), _flat(v)
        out = torch.empty(r, length, h, d)
        top, total = (np.empty((kv_heads, r * length * h // kv_heads), dtype) for dtype in (np.float32, np.float64))
        result = out.numpy().reshape(-1)

        def kernel(start: int, stop: int) -> int:
            arrays = queries, keys, values, first, last, result, top, total
            return int(forward_kernels.forward(start, stop, spec, spans, *arrays))

        _in_parts(kernel, len(spans) * kv_heads, _cost(spec, first, last))
        out = out.transpose(1, 2)
        ctx.save_for_backward(q, k, v, out)
        ctx.spec, ctx.spans, ctx.of_queries = spec, (spans, first, last), (top, total)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        spec, (spans, first, last) = ctx.spec, ctx.spans
        saved = Saved(_flat(q), _flat(k), _flat(v), _flat(out), _flat(grad), *ctx.of_queries)
        gradients = [torch.empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v)]
        results = [x.numpy().reshape(-1) for x in gradients]

        def kernel(start: int, stop: int) -> int:
            return int(backward_kernels.backward(start, stop, spec, spans, saved, first, last, *results))

        _in_parts(kernel, len(spans) * spec.kv_heads, _BACKWARD_COST * _cost(spec, first, last))
        dq, dk, dv = (x.transpose(1, 2) for x in gradients)
        return dq, dk, dv, None, None, None, None


def attend(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, scaling: float, context: int) -> Tensor:
    """softmax(q k^T scaling) v, query i of row r over keys begin[r, i]..end[r, i]-1; differentiable in q, k, v.

    q [R, H, L, D], k and v [R, Hk, L, D] float32, begin and end [R, L] int64 -> [R, H, L, D] float32.
    """
    return _Attention.apply(q, k, v, begin, end, scaling, context)


def attend_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: GridCache,
    layer: int,
    begin: Tensor,
    end: Tensor,
    scaling: float,
    context: int,
) -> Tensor:
    """Store new keys and values where `cache` aims, then `attend` over positions begin..end-1 of each row's slot."""
    (r, h, length, d), kv_heads = q.shape, k.shape[1]
    spec = _spec(q, kv_heads, scaling, context)
    out = attend_arrays(_flat(q), _flat(k), _flat(v), cache, layer, begin.numpy(), end.numpy(), spec)
    return torch.from_numpy(out).view(r, length, h, d).transpose(1, 2)


def attend_arrays(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cache: GridCache,
    layer: int,
    begin: np.ndarray,
    end: np.ndarray,
    spec: Spec,
) -> np.ndarray:
    """`attend_cached` of contiguous float32 q [R, L, H, D] and k, v [R, L, Hk, D], however shaped -> [R, L H D]."""
    assert cache.aimed is not None, "aim first"
    slots, positions, valid = (
        x.contiguous().numpy() for x in (cache.aimed.slots, cache.aimed.positions, cache.aimed.valid)
    )
    held = cache.keys[layer].numpy(), cache.values[layer].numpy(), cache.value_scales[layer].numpy()
    queries, keys, values = (x.reshape(-1) for x in (q, k, v))
    rows = len(slots)
    result = np.empty(queries.size, np.float32)

    def store(start: int, stop: int) -> None:
        forward_kernels.store(start, stop, spec, slots, positions, valid, keys, values, *held)

    def kernel(start: int, stop: int) -> int:
        return int(forward_kernels.forward_cached(start, stop, spec, queries, slots, begin, end, *held, result))

    pool.in_parts(store, rows, keys.size / rows * 2.0)
    _in_parts(kernel, rows * spec.kv_heads, _cost(spec, begin, end))
    return result.reshape(rows, -1)
