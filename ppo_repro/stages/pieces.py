"""What is computed from logits, piece by piece: the logits of a large vocabulary are never whole in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ppo_repro.numerics.rows import Rows

LOGITS_AT_ONCE = 1 << 24  # elements of the logits that are in memory at once

OfRows = Callable[
    [Tensor, slice, Rows], tuple[Tensor, ...]
]  # hidden states [r, H], which rows they are -> [r, ..] each


def in_pieces(compute: OfRows, hidden: Tensor, rows: Rows, vocab_size: int) -> tuple[Tensor, ...]:
    """`compute` of hidden states [n, H] that have logits, LOGITS_AT_ONCE elements at a time, its tensors joined.

    If there are several pieces, a backward pass computes each again, in order, and holds the logits of one.
    """
    pieces = rows.pieces(max(1, LOGITS_AT_ONCE // vocab_size))
    if len(pieces) == 1:
        return compute(hidden, pieces[0], rows)
    if torch.is_grad_enabled() and hidden.requires_grad:
        return _Pieces.apply(hidden, compute, rows, pieces)
    return _joined([compute(hidden[piece], piece, rows.piece(piece)) for piece in pieces])


def _joined(found: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(column) for column in zip(*found, strict=True))


class _Pieces(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, compute: OfRows, rows: Rows, pieces: list[slice]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden)
        ctx.compute, ctx.rows, ctx.pieces = compute, rows, pieces
        return _joined([compute(hidden[piece], piece, rows.piece(piece)) for piece in pieces])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        gradient = torch.empty_like(hidden)
        for piece in ctx.pieces:
            with torch.enable_grad():
                part = hidden[piece].detach().requires_grad_()
                found = ctx.compute(part, piece, ctx.rows.piece(piece))
            trained = [(out, grad[piece]) for out, grad in zip(found, grads, strict=True) if out.requires_grad]
            torch.autograd.backward([out for out, _ in trained], [grad for _, grad in trained])
            gradient[piece] = part.grad
        return gradient, None, None, None
