"""A linear layer that stands alone: heads of models, layers of control networks."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ppo_repro.numerics import library
from ppo_repro.numerics.gradient_sums import Sums, sums_of
from ppo_repro.numerics.rows import Rows
from ppo_repro.numerics.structs import MatrixStruct, address, rows_of
from ppo_repro.numerics.weights import PackedMatrix, packed


def product(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """x W^T + b, [n, N] float32 without a gradient; x [n, K] float32."""
    x, struct = rows_of(x), matrix.prepare()
    y = torch.empty(len(x), struct.n)
    library.load().linear(ctypes.byref(struct), address(x), struct.k, len(x), None, address(y), struct.n)
    return y


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matrix: PackedMatrix, rows: Rows | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.matrix, ctx.rows = matrix, rows
        return product(x, matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,), matrix, rows = ctx.saved_tensors, ctx.matrix, ctx.rows
        matrix.prepare()
        grad, x = rows_of(grad), rows_of(x)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        parameters = (*matrix.weights, *matrix.biases)
        if not any(p.requires_grad for p in parameters):
            matrix.collect(None)
            _backward(matrix, grad, x, None, None, dx)
            return dx, None, None, None
        sums = sums_of(*parameters)
        if sums is None or rows is None:
            raise ValueError("nothing collects the gradients of this layer, or its rows are not known")
        use = sums.use("linear", *parameters)
        matrix.collect(use)
        with use.adding(rows.slots) as c_sums:
            _backward(matrix, grad, x, rows, c_sums, dx)
        return dx, None, None, None


def _backward(
    matrix: PackedMatrix, grad: Tensor, x: Tensor, rows: Rows | None, sums: Sums | None, dx: Tensor | None
) -> None:
    """Gradients of a layer's inputs, into dx, and of its weights, into sums; None for none."""
    struct = matrix.struct
    of_rows = (None, None, None) if rows is None else map(address, (rows.sequence, rows.position, rows.slots))
    into = None if sums is None else ctypes.byref(sums)
    products = ctypes.byref(struct), address(grad), struct.n, address(x), struct.k, len(x)
    library.load().linear_backward(*products, *of_rows, into, address(dx), struct.k)


def linear(x: Tensor, layer: nn.Module, rows: Rows | None = None) -> Tensor:
    """x W^T + b of an nn.Linear, [n, N] float32, differentiable in x [n, K]; gradients of W and b go to GradientSums.

    `rows` says which sequence each row of x belongs to; None where W and b are not trained.
    """
    matrix = packed(layer)
    if torch.is_grad_enabled() and (x.requires_grad or matrix.weights[0].requires_grad):
        return _Linear.apply(x, matrix.weights[0], matrix, rows)
    return product(x, matrix)


def add_to_bias(bias: Tensor, grad: Tensor, rows: Rows) -> None:
    """Add the gradients [n, N] of the rows that a bias [N] was added to, float32, to the GradientSums of the bias."""
    sums = sums_of(bias)
    if sums is None:
        raise ValueError("nothing collects the gradient of this bias")
    use, grad = sums.use("bias", bias), rows_of(grad)
    struct = MatrixStruct(n=len(bias), bias=address(bias), grad=-1, bias_grad=use.offset(bias))
    with use.adding(rows.slots) as c_sums:
        library.load().linear_backward(
            ctypes.byref(struct), address(grad), struct.n, None, 0, len(grad),
            address(rows.sequence), address(rows.position), address(rows.slots), ctypes.byref(c_sums), None, 0,
        )  # fmt: skip
