"""Exact attention by kernels, over all threads: of tensors on a CPU, and of the flat arrays the kernels take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.grid import ATTENTION_NOT_FINITE
from ppo_repro.numerics.kernels.attention import backward as backward_kernels
from ppo_repro.numerics.kernels.attention import forward as forward_kernels
from ppo_repro.numerics.kernels.attention.block import Spec, cut_spans
from ppo_repro.numerics.kernels.attention.keys import Saved
from ppo_repro.numerics.kernels.core import pool
from ppo_repro.numerics.layers.kv_cache import GridCache

NOT_FINITE = ATTENTION_NOT_FINITE
_INFINITY_BITS = 0x7F800000
_MOST_WEIGHTS = 2**18  # held at once, and as many score gradients: 4 MiB, about the size of a CPU's cache
_LEAST_SPAN = 64  # positions; fewer are not worth a block of queries of their own
_BACKWARD_COST = 3.5  # times the forward; like all costs here, only to decide how many threads are worth waking


def _flat(x: Tensor) -> np.ndarray:
    """[R, H, L, D] as flat [R, L, H, D]; no copy of a projection as transformers shapes it."""
    if x.dtype != torch.float32:
        raise TypeError(f"exact attention takes float32, not {x.dtype}")
    return x.detach().transpose(1, 2).contiguous().numpy().reshape(-1)


def _shaped(flat: np.ndarray, like: Tensor) -> Tensor:
    """Flat [R, L, H, D] as [R, H, L, D]."""
    r, h, length, d = like.shape
    return torch.from_numpy(flat).view(r, length, h, d).transpose(1, 2)


def _spec(q: Tensor, kv_heads: int, scaling: float) -> Spec:
    return spec_of(q.shape[1], kv_heads, q.shape[3], scaling)


def spec_of(heads: int, kv_heads: int, dim: int, scaling: float) -> Spec:
    """The sizes of an attention, and how much memory its backward may use."""
    return Spec(heads, kv_heads, dim, float(scaling), _MOST_WEIGHTS)


def _in_parts(kernel: Callable[[int, int], int], rows: int, nanoseconds: float) -> None:
    """Run a kernel that returns the bits of its largest magnitude; NumericsError if that is not finite."""

    def part(begin: int, end: int) -> None:
        if kernel(begin, end) >= _INFINITY_BITS:
            raise NumericsError(NOT_FINITE)

    pool.in_parts(part, rows, nanoseconds / rows)


def cost(spec: Spec, begin: np.ndarray, end: np.ndarray) -> float:
    """Nanoseconds of a forward: two products and an exponential for every pair of a query and a key it sees."""
    return float(np.maximum(end - begin, 0).sum()) * spec.heads * (0.07 * spec.dim + 3.0)


@dataclass(frozen=True)
class Reach:
    """The keys of each query, [R, L] flat: first..last - 1; and the spans of rows that do not see one another."""

    spans: np.ndarray
    first: np.ndarray
    last: np.ndarray


def reach_of(begin: Tensor, end: Tensor) -> Reach:
    """Query i of row r sees keys begin[r, i]..end[r, i]-1; int64 [R, L]."""
    return Reach(*cut_spans(begin.numpy(), end.numpy(), _LEAST_SPAN))


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, reach: Reach, spec: Spec
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Results [R L, H, D] float32, and each query's largest score and sum of weights; all flat, as q, k and v are."""
    out = np.empty_like(q)
    queries = q.size // spec.dim // spec.kv_heads
    top, total = (np.empty((spec.kv_heads, queries), dtype) for dtype in (np.float32, np.float64))

    def kernel(start: int, stop: int) -> int:
        arrays = q, k, v, reach.first, reach.last, out, top, total
        return int(forward_kernels.forward(start, stop, spec, reach.spans, *arrays))

    _in_parts(kernel, len(reach.spans) * spec.kv_heads, cost(spec, reach.first, reach.last))
    return out, top, total


def backward(saved: Saved, reach: Reach, spec: Spec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of q, k and v, flat as they are."""
    results = np.empty_like(saved.q), np.empty_like(saved.k), np.empty_like(saved.v)

    def kernel(start: int, stop: int) -> int:
        return int(backward_kernels.backward(start, stop, spec, reach.spans, saved, reach.first, reach.last, *results))

    nanoseconds = _BACKWARD_COST * cost(spec, reach.first, reach.last)
    _in_parts(kernel, len(reach.spans) * spec.kv_heads, nanoseconds)
    return results


class _Attention(Function):
    """As the reference in `attention`; the backward computes the weights again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, scaling: float) -> Tensor:
        spec, reach = _spec(q, k.shape[1], scaling), reach_of(begin, end)
        result, top, total = forward(_flat(q), _flat(k), _flat(v), reach, spec)
        out = _shaped(result, q)
        ctx.save_for_backward(q, k, v, out)
        ctx.spec, ctx.reach, ctx.query_sums = spec, reach, (top, total)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        saved = Saved(_flat(q), _flat(k), _flat(v), _flat(out), _flat(grad), *ctx.query_sums)
        results = backward(saved, ctx.reach, ctx.spec)
        dq, dk, dv = (_shaped(result, x) for result, x in zip(results, (q, k, v), strict=True))
        return dq, dk, dv, None, None, None


def attend(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, scaling: float) -> Tensor:
    """softmax(q k^T scaling) v, query i of row r over keys begin[r, i]..end[r, i]-1; differentiable in q, k, v.

    q [R, H, L, D], k and v [R, Hk, L, D] float32, begin and end [R, L] int64 -> [R, H, L, D] float32.
    """
    return _Attention.apply(q, k, v, begin, end, scaling)


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, cache: GridCache, layer: int, begin: Tensor, end: Tensor, scaling: float
) -> Tensor:
    """Store new keys and values in the target of `cache`, then `attend` over positions begin..end-1 of the slots."""
    (r, h, length, d), kv_heads = q.shape, k.shape[1]
    spec = _spec(q, kv_heads, scaling)
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
    """`attend_cached` of contiguous arrays in the order q [R, L, H, D], k and v [R, L, Hk, D] -> flat [R, L, H, D]."""
    slots, positions, valid = cache.target.arrays
    contents = cache.arrays[layer]
    queries, keys, values = (x.reshape(-1) for x in (q, k, v))
    rows = len(slots)
    result = np.empty(queries.size, np.float32)

    def store(start: int, stop: int) -> None:
        forward_kernels.store(start, stop, spec, slots, positions, valid, keys, values, *contents)

    def kernel(start: int, stop: int) -> int:
        return int(forward_kernels.forward_cached(start, stop, spec, queries, slots, begin, end, *contents, result))

    pool.in_parts(store, rows, keys.size / rows * 2.0)
    _in_parts(kernel, rows * spec.kv_heads, cost(spec, begin, end))
    return result
