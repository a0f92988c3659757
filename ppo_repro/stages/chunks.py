"""What is computed from logits, chunk by chunk: the logits of a large vocabulary are never whole in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ppo_repro.numerics.rows import Rows

LOGITS_AT_ONCE = 1 << 24  # elements of the logits that are in memory at once

# hidden states [r, H], and which rows they are -> tensors [r, ...]
OfRows = Callable[[Tensor, slice, Rows], tuple[Tensor, ...]]


def in_chunks(compute: OfRows, hidden: Tensor, rows: Rows, vocab_size: int) -> tuple[Tensor, ...]:
    """Apply `compute` to hidden states [n, H], LOGITS_AT_ONCE elements of logits at a time, and join its tensors.

    If there are several chunks, a backward pass computes each again, in order, and holds the logits of one.
    """
    chunks = rows.pieces(max(1, LOGITS_AT_ONCE // vocab_size))
    if len(chunks) == 1:
        return compute(hidden, chunks[0], rows)
    if torch.is_grad_enabled() and hidden.requires_grad:
        return _Chunks.apply(hidden, compute, rows, chunks)
    return _joined(compute, hidden, rows, chunks)


def _joined(compute: OfRows, hidden: Tensor, rows: Rows, chunks: list[slice]) -> tuple[Tensor, ...]:
    computed = [compute(hidden[chunk], chunk, rows.piece(chunk)) for chunk in chunks]
    return tuple(torch.cat(column) for column in zip(*computed, strict=True))


class _Chunks(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, compute: OfRows, rows: Rows, chunks: list[slice]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden)
        ctx.compute, ctx.rows, ctx.chunks = compute, rows, chunks
        return _joined(compute, hidden, rows, chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        gradient = torch.empty_like(hidden)
        for chunk in ctx.chunks:
            with torch.enable_grad():
                part = hidden[chunk].detach().requires_grad_()
                computed = ctx.compute(part, chunk, ctx.rows.piece(chunk))
            trained = [(out, grad[chunk]) for out, grad in zip(computed, grads, strict=True) if out.requires_grad]
            torch.autograd.backward([out for out, _ in trained], [grad for _, grad in trained])
            gradient[chunk] = part.grad
        return gradient, None, None, None
