"""Attention by Triton's kernels, with the bits of the eager code in `layers.attention`; differentiable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.grid import ATTENTION_NOT_FINITE, MAX_TERMS
from ppo_repro.numerics.kernels.triton import attention_backward as backward_kernels
from ppo_repro.numerics.kernels.triton import attention_forward as forward_kernels
from ppo_repro.numerics.kernels.triton import attention_tiles as tiles
from ppo_repro.numerics.kernels.triton.functions import NOT_FINITE
from ppo_repro.numerics.kernels.triton.launch import WARPS4

INFINITY_BITS = 0x7F800000
BLOCK, KEYS = 16, 32  # queries and keys of a tile; a larger one does not fit into registers
DEPTH = 16  # of the products that make a tile of scores
MOST_COLUMNS = 64  # of a result that a program sums at a time
QUERIES, KEY_GRADIENTS, VALUE_GRADIENTS = 0, 1, 2


@dataclass(frozen=True)
class Sizes:
    """How many of what a head of keys has."""

    heads: int  # of keys, over the whole batch
    kv_heads: int  # in one row of the batch
    rows: int  # queries: those of all heads that share a head of keys
    length: int  # queries of one head
    keys: int
    dim: int

    @property
    def width(self) -> int:
        """The numbers of a row in memory, a power of two."""
        return max(16, triton.next_power_of_2(self.dim))

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """As the kernels take them."""
        return self.rows, self.length, self.kv_heads, self.keys

    @property
    def constants(self) -> dict[str, Any]:
        """How every kernel with tiles is started."""
        return {"WIDTH": self.width, "BM": BLOCK, "BN": KEYS, "BK": DEPTH, **WARPS4}

    @property
    def columns(self) -> int:
        """Columns of a result that a program sums at a time."""
        return min(MOST_COLUMNS, self.width)


@dataclass(frozen=True)
class Grids:
    """Rows [N, width] as left operands (integers of 25 bits) and as right ones (of 24, with their scales)."""

    exponents: Tensor  # int32 [N]
    left: Tensor
    right: Tensor
    scales: Tensor  # float32 [N]


def _grids(x: Tensor, sizes: Sizes, as_left: bool = False, as_right: bool = False) -> Grids:
    rows, width = x.numel() // sizes.dim, sizes.width
    exponents = torch.empty(rows, dtype=torch.int32, device=x.device)
    left = torch.empty((rows, width) if as_left else 0, dtype=torch.int32, device=x.device)
    right = torch.empty((rows, width) if as_right else 0, dtype=torch.float32, device=x.device)
    scales = torch.empty(rows if as_right else 0, dtype=torch.float32, device=x.device)
    together = max(1, min(32, 2048 // width))
    tiles.put_rows[(-(-rows // together),)](
        x, exponents, left, right, scales, rows, sizes.dim,
        AS_LEFT=as_left, AS_RIGHT=as_right, R=together, WIDTH=width, **WARPS4,
    )  # fmt: skip
    return Grids(exponents, left, right, scales)


def _require_finite(bits: Tensor, out: tuple[Tensor, ...], grids: tuple[Grids, ...]) -> None:
    finite = [bits.amax() < INFINITY_BITS, *(torch.isfinite(x).all() for x in out)]
    finite += [grid.exponents.amax() < NOT_FINITE.value for grid in grids]
    if not bool(torch.stack(finite).all()):
        raise NumericsError(ATTENTION_NOT_FINITE)


@dataclass(frozen=True)
class Source:
    """Where the keys and values of a pass lie, and how."""

    keys: Tensor
    key_scales: Tensor  # not read where the keys have theirs multiplied in
    values: Tensor
    value_scales: Tensor
    places: Tensor  # int64 [heads], of each head among those in memory
    key_size: int  # numbers of a head
    value_size: int
    value_row: int
    panel: int  # keys lie transposed in panels of so many; 0: in rows


@dataclass(frozen=True)
class Reach:
    """The keys begin..end - 1 of each query, int32 [B, I]."""

    begin: Tensor
    end: Tensor


def _forward(queries: Grids, source: Source, reach: Reach, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results [heads, rows, dim]; of each query the largest score, the sum of weights, and the largest score's bits."""
    shape, device = (sizes.heads, sizes.rows), source.keys.device
    tops, totals = torch.empty(shape, device=device), torch.empty(shape, dtype=torch.float64, device=device)
    exponents, largest = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
    out = torch.empty(*shape, sizes.dim, device=device)
    counts = sizes.counts
    constants = {"PANEL": source.panel, **sizes.constants}
    programs = -(-sizes.rows // BLOCK), sizes.heads
    forward_kernels.softmax_sums[programs](
        queries.left, queries.exponents, source.keys, source.key_scales, source.value_scales, source.places,
        reach.begin, reach.end, tops, totals, exponents, largest, *counts, source.key_size, sizes.dim, **constants,
    )  # fmt: skip
    forward_kernels.weighted_values[(*programs, -(-sizes.dim // sizes.columns))](
        queries.left, queries.exponents, source.keys, source.key_scales, source.values, source.value_scales,
        source.places, reach.begin, reach.end, tops, totals, exponents, out,
        *counts, source.key_size, source.value_size, source.value_row, sizes.dim,
        LONG=sizes.keys > tiles.CHUNK, CHUNK=tiles.CHUNK, BD=sizes.columns, **constants,
    )  # fmt: skip
    return out, tops, totals, largest


def _sizes(q: Tensor, kv_heads: int, keys: int) -> Sizes:
    """The sizes for queries [B, H, I, D]."""
    batch, heads, length, dim = q.shape
    rows = heads // kv_heads * length
    if max(rows, keys) > MAX_TERMS:
        raise NumericsError(f"a sum of {max(rows, keys)} products; at most {MAX_TERMS} are exact")
    return Sizes(batch * kv_heads, kv_heads, rows, length, keys, dim)


def _reach(begin: Tensor, end: Tensor) -> Reach:
    return Reach(*(x.to(torch.int32).contiguous() for x in (begin, end)))


class _Attention(Function):
    """o_i = sum_j w_ij v_j, w = softmax(q k^T scaling); the backward computes the weights again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, scaling: float) -> Tensor:
        sizes, reach = _sizes(q, k.shape[1], k.shape[2]), _reach(begin, end)
        rows, keys, values = (q * scaling).contiguous(), k.contiguous(), v.contiguous()
        queries = _grids(rows, sizes, as_left=True)
        key_grid, value_grid = (_grids(x, sizes, as_right=True) for x in (keys, values))
        size = sizes.keys * sizes.width
        places = torch.arange(sizes.heads, device=q.device)
        source = Source(
            key_grid.right, key_grid.scales, value_grid.right, value_grid.scales, places, size, size, sizes.width, 0
        )
        out, tops, totals, largest = _forward(queries, source, reach, sizes)
        _require_finite(largest, (out,), (queries, key_grid, value_grid))
        ctx.save_for_backward(rows, keys, values, out, tops, totals)
        ctx.sizes, ctx.reach, ctx.scaling, ctx.shapes = sizes, reach, scaling, (q.shape, k.shape)
        return out.view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, keys, values, out, tops, totals = ctx.saved_tensors
        sizes, upstream = ctx.sizes, grad.contiguous()
        query_grid, grad_grid = (_grids(x, sizes, as_left=True, as_right=True) for x in (rows, upstream))
        key_grid, value_grid = (_grids(x, sizes, as_right=True) for x in (keys, values))
        operands = (
            query_grid.left, query_grid.exponents, query_grid.scales, key_grid.right, key_grid.scales,
            value_grid.right, value_grid.scales, grad_grid.left, grad_grid.exponents, grad_grid.scales,
            tops, totals, _dots(upstream, out, sizes),
        )  # fmt: skip
        dq = _query_gradients(operands, ctx.reach, ctx.scaling, sizes)
        dk = _key_gradients(operands, query_grid.right, ctx.reach, KEY_GRADIENTS, sizes)
        dv = _key_gradients(operands, grad_grid.right, ctx.reach, VALUE_GRADIENTS, sizes)
        _require_finite(torch.zeros(1, dtype=torch.int32, device=grad.device), (dq, dk, dv), (grad_grid,))
        q_shape, k_shape = ctx.shapes
        return dq.view(q_shape), dk.view(k_shape), dv.view(k_shape), None, None, None


def _dots(grad: Tensor, out: Tensor, sizes: Sizes) -> Tensor:
    rows, width = sizes.heads * sizes.rows, sizes.width
    dots = torch.empty(rows, dtype=torch.float64, device=out.device)
    together = max(1, min(32, 2048 // width))
    tiles.row_dots[(-(-rows // together),)](grad, out, dots, rows, sizes.dim, R=together, WIDTH=width, **WARPS4)
    return dots


def _query_gradients(operands: tuple[Tensor, ...], reach: Reach, scaling: float, sizes: Sizes) -> Tensor:
    device = operands[0].device
    exponents = torch.empty(sizes.heads, sizes.rows, dtype=torch.int32, device=device)
    dq = torch.empty(sizes.heads, sizes.rows, sizes.dim, device=device)
    counts, programs = sizes.counts, (-(-sizes.rows // BLOCK), sizes.heads)
    backward_kernels.query_grids[programs](
        *operands, reach.begin, reach.end, exponents, *counts, **sizes.constants
    )  # fmt: skip
    factor = torch.full((1,), scaling, dtype=torch.float64, device=device)  # a number would arrive as float32
    backward_kernels.query_gradients[(*programs, -(-sizes.dim // sizes.columns))](
        *operands, reach.begin, reach.end, exponents, factor, dq, *counts, sizes.dim,
        LONG=sizes.keys > tiles.CHUNK, CHUNK=tiles.CHUNK, BD=sizes.columns, **sizes.constants,
    )  # fmt: skip
    return dq


def _key_gradients(operands: tuple[Tensor, ...], right: Tensor, reach: Reach, kind: int, sizes: Sizes) -> Tensor:
    device = right.device
    exponents = torch.empty(sizes.heads, sizes.keys, dtype=torch.int32, device=device)
    gradient = torch.empty(sizes.heads, sizes.keys, sizes.dim, device=device)
    counts, programs = sizes.counts, (-(-sizes.keys // KEYS), sizes.heads)
    backward_kernels.key_grids[programs](
        *operands, reach.begin, reach.end, exponents, *counts, KIND=kind, **sizes.constants
    )
    backward_kernels.key_gradients[(*programs, -(-sizes.dim // sizes.columns))](
        *operands, right, reach.begin, reach.end, exponents, gradient, *counts, sizes.dim,
        KIND=kind, LONG=sizes.rows > tiles.CHUNK, CHUNK=tiles.CHUNK, BD=sizes.columns, **sizes.constants,
    )  # fmt: skip
    return gradient


def attend(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, scaling: float) -> Tensor:
    """softmax(q k^T scaling) v, query i of row r over keys begin[r, i]..end[r, i]-1; differentiable in q, k, v.

    q [R, H, L, D], k and v [R, Hk, L, D] float32, begin and end [R, L] int64 -> [R, H, L, D] float32. Raises
    NumericsError where a number is not finite, or for more than 2^20 keys, or queries of a head of keys.
    """
    return _Attention.apply(q, k, v, begin, end, scaling)


def attend_cached(
    q: Tensor, keys: Tensor, values: Tensor, value_scales: Tensor, slots: Tensor, begin: Tensor, end: Tensor,
    scaling: float,
) -> Tensor:  # fmt: skip
    """Queries [R, H, L, D] over positions begin..end-1 [R, L] of `slots` [R] in the stores of a `GridCache`.

    Keys [S, Hk, panels, D, C], values [S, Hk, P, D padded] and their scales [S, Hk, P], float32 -> [R, H, L, D].
    Raises NumericsError as `attend` does.
    """
    kv_heads, panels, dim, panel = keys.shape[1:]
    positions, padded = values.shape[2:]
    sizes = _sizes(q, kv_heads, positions)
    queries = _grids((q * scaling).contiguous(), sizes, as_left=True)
    places = (slots[:, None] * kv_heads + torch.arange(kv_heads, device=q.device)).reshape(-1)
    source = Source(
        keys, value_scales, values, value_scales, places, panels * dim * panel, positions * padded, padded, panel
    )
    out, _, _, largest = _forward(queries, source, _reach(begin, end), sizes)
    _require_finite(largest, (out,), (queries,))
    return out.view(q.shape)
