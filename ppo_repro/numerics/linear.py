"""Compute linear layers outside of trunks: heads, and layers of control networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ppo_repro.base.mode import Precision
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.gradient_sums import SlotSums
from ppo_repro.numerics.interface import Struct, ffi, pointer
from ppo_repro.numerics.matrices import PackedMatrix, Packing, packed
from ppo_repro.numerics.sequences import Rows, edge_of, sums_of

LAYER = "a linear layer"


def product(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """Return x W^T + b, [n, N] float32 without a gradient; x [n, K] float32."""
    x, packed_matrix = x.detach().contiguous(), matrix.prepare()
    if x.dim() != 2 or x.shape[1] != packed_matrix.k:
        raise ValueError(f"expected inputs [n, {packed_matrix.k}], got {list(x.shape)}")
    y = torch.empty(len(x), packed_matrix.n, device=x.device)
    kernels_of(x.device).linear(packed_matrix, pointer(x, x.device), len(x), ffi.NULL, pointer(y, x.device))
    return y


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: Tensor | None, matrix: PackedMatrix, rows: Rows | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.matrix, ctx.rows = matrix, rows
        return product(x, matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,), matrix, parameters = ctx.saved_tensors, ctx.matrix, (*ctx.matrix.weights, *ctx.matrix.biases)
        matrix.prepare()
        grad, x = grad.contiguous(), x.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        slot_sums = None
        if any(p.requires_grad for p in parameters):
            slot_sums = sums_of(ctx.rows, LAYER).sums_for("linear", *((p,) for p in parameters))
        matrix.set_gradient_offsets(slot_sums)
        _backward(matrix.struct, grad, x, ctx.rows, slot_sums, dx)
        return dx, None, None, None


def _backward(
    matrix: Struct, grad: Tensor, x: Tensor | None, rows: Rows | None, slot_sums: SlotSums | None, dx: Tensor | None
) -> None:
    """Compute the gradients of a layer's inputs and weights.

    Args:
        grad: gradient of the outputs, float32 [n, N].
        x: inputs, float32 [n, K]; None if only a bias is trained.
        rows: the sequence of each of the n rows; None if the weights are not trained.
        slot_sums: the sums that receive the gradients of weight and bias; None if weight and bias are not trained.
        dx: receives the gradient of the inputs, float32 [n, K]; None if the inputs need no gradient.
    """
    device = grad.device
    backward = kernels_of(device).linear_backward
    layer = matrix, pointer(grad, device), pointer(x, device), len(grad)
    if slot_sums is None or rows is None:
        backward(*layer, ffi.NULL, ffi.NULL, ffi.NULL, ffi.NULL, pointer(dx, device))
        return
    with slot_sums.adding(rows.slots) as sums:
        order = pointer(rows.sequence), pointer(rows.position), pointer(rows.slots)
        backward(*layer, *order, sums, pointer(dx, device))


def linear(x: Tensor, layer: nn.Module, rows: Rows | None = None, precision: Precision = "highest") -> Tensor:
    """Return x W^T + b of an nn.Linear, [n, N] float32, differentiable in x [n, K].

    Gradients of W and b go to `rows.sums`. `rows` has the sequence of each row of x, and may be None if W and b are not
    trained. Raises ValueError if nothing receives their gradients.
    """
    matrix = packed(layer, Packing(precision=precision))
    trained = [p for p in (*matrix.weights, *matrix.biases) if p.requires_grad]
    if torch.is_grad_enabled() and (x.requires_grad or trained):
        if trained:
            sums_of(rows, LAYER)
        return _Linear.apply(x, edge_of(rows, trained), matrix, rows)
    return product(x, matrix)


def add_to_bias(bias: Tensor, grad: Tensor, rows: Rows) -> None:
    """Add the gradients `grad` [n, N] float32 of rows that include a bias [N] to `rows.sums`."""
    slot_sums = sums_of(rows, "a bias").sums_for("bias", (bias,))
    matrix = ffi.new(
        "Matrix *", dict(n=len(bias), bias=pointer(bias, bias.device), grad=-1, bias_grad=slot_sums.offset(bias))
    )
    _backward(matrix, grad.detach().contiguous(), None, rows, slot_sums, None)
