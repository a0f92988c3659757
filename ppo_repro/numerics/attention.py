"""Exact attention: a query's result uses nothing but the keys it may see, in any order and layout.

The number grids are constants of the run (`max_context`), never of the current length; otherwise decoding
and the full forward would round differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ppo_repro.numerics import elementwise
from ppo_repro.numerics.grid import MANTISSA_BITS, OPERAND_BITS, ceil_log2, contract, operand_bits, quantise

IMPLEMENTATION = "ppo_repro_exact"
WEIGHT_UNIT = 2.0**30  # softmax weights are integers in units of 2^-30


def folded_bits(max_terms: int) -> int:
    """Bits of a weight that carries its key's (or query's) exponent, for sums of up to `max_terms` terms."""
    return min(22, MANTISSA_BITS - OPERAND_BITS - ceil_log2(max_terms))


class _Attention(Function):
    """o_i = sum_j w_ij v_j, w = softmax(q k^T scaling) over visible keys.

    q [B, H, I, D], k and v [B, Hk, J, D] float32, visible [B or 1, 1, I, J] bool -> [B, H, I, D] float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scaling: float, context: int) -> Tensor:
        b, h, i, d = q.shape
        kv_heads, j = k.shape[1], k.shape[2]
        groups = h // kv_heads
        qg = quantise((q * scaling).reshape(b, kv_heads, groups * i, d), operand_bits(d))
        kg, vg = quantise(k, operand_bits(d)), quantise(v, OPERAND_BITS)
        mask = visible.expand(b, 1, i, j).repeat(1, 1, groups, 1)
        scores = contract(qg, kg).masked_fill(~mask, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        # a query that sees no key has maximum -inf; its weights must come out as 0, not NaN
        top = torch.where(torch.isinf(top), 0.0, top)
        integers = (elementwise.exp(scores - top).to(torch.float64) * WEIGHT_UNIT).round_().masked_fill_(~mask, 0.0)
        total = integers.sum(-1, keepdim=True)
        total = torch.where(total > 0, total, 1.0)
        folded, folded_scale = quantise(integers * vg[1].transpose(-1, -2), folded_bits(context))
        out = (folded @ vg[0]).mul_(folded_scale).div_(total).to(torch.float32).add_(0.0)
        ctx.save_for_backward(*qg, *kg, *vg, integers.div_(total), out)
        ctx.scaling, ctx.context, ctx.shapes = scaling, context, (q.shape, k.shape)
        return out.view(b, h, i, d)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_int, q_scale, k_int, k_scale, v_int, v_scale, weights, out = ctx.saved_tensors
        q_shape, k_shape = ctx.shapes
        query_rows = grad.reshape(out.shape)
        dg = quantise(query_rows, OPERAND_BITS)
        og = quantise(out, OPERAND_BITS)
        dp = (dg[0] @ v_int.transpose(-1, -2)).mul_(dg[1]).mul_(v_scale.transpose(-1, -2))
        delta = (dg[0] * og[0]).sum(-1, keepdim=True) * dg[1] * og[1]
        ds = (dp - delta).mul_(weights)
        key_bits = folded_bits(ctx.context)
        # a key is seen by at most `context` queries of each head of its group
        query_bits = folded_bits(ctx.context * (q_shape[1] // k_shape[1]))
        a, scale = quantise(ds * k_scale.transpose(-1, -2), key_bits)
        dq = (a @ k_int).mul_(scale).mul_(ctx.scaling)
        a, scale = quantise((ds * q_scale).transpose(-1, -2), query_bits)
        dk = (a @ q_int).mul_(scale)
        a, scale = quantise((weights * dg[1]).transpose(-1, -2), query_bits)
        dv = (a @ dg[0]).mul_(scale)
        return (
            dq.to(torch.float32).view(q_shape),
            dk.to(torch.float32).view(k_shape),
            dv.to(torch.float32).view(k_shape),
            None,
            None,
            None,
        )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls for IMPLEMENTATION; the mask is boolean, True = visible.

    Raises TypeError where the caller asks for anything else (an additive mask, dropout, a window).
    """
    if attention_mask is None or attention_mask.dtype != torch.bool:
        raise TypeError("exact attention needs a boolean 4-d mask")
    unsupported = {name for name in ("dropout", "sliding_window", "softcap") if options.get(name)}
    if unsupported:
        raise TypeError(f"exact attention does not know {', '.join(sorted(unsupported))}")
    out = _Attention.apply(query, key, value, attention_mask, scaling, module.max_context)
    return out.transpose(1, 2).contiguous(), None
