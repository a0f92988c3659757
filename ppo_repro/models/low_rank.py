"""Low-rank adapters (Hu et al., 2022): the merged weight that every forward pass uses, and gradients of the factors.

W' = W + s B A, A [r, K], B [N, r]. Other implementations compute x W^T + s (x A^T) B^T in training and merge for
generation, which round differently. Here every pass uses the merged matrix.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ppo_repro.numerics import library
from ppo_repro.numerics.structs import MatrixStruct, address


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[M, N], [N, K] -> sum_n a[m, n] b[n, k] [M, K] by the kernels: blocks of 128 terms, each a chain of fma."""
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty(len(a), b.shape[1])
    matrix = MatrixStruct(w=address(b), n=len(b), k=b.shape[1], grad=-1, bias_grad=-1)
    (terms, columns), rows = b.shape, len(a)
    library.load().linear_backward_input(ctypes.byref(matrix), address(a), terms, rows, address(out), columns, 1)
    return out


def merge(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W' = W + s (B A), each product and sum rounded once; base [N, K], a [r, K], b [N, r] float32 -> [N, K] float32.

    Where B A is zero, W' has the bits of W, including the sign of zero.
    """
    product = _product(b, a)
    return torch.where(product == 0, base, base + product * scale)


def factor_gradients(gradient: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """dA = s (B^T dW') and dB = s (dW' A^T); gradient [N, K] -> float32 [r, K], [N, r].

    They are functions of dW' alone, so they do not depend on how the work was split up.
    """
    return _product(b.t(), gradient) * scale, _product(gradient, a.t()) * scale


def merge_native(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`merge` in stock torch."""
    return base + (b @ a) * scale


def factor_gradients_native(gradient: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`factor_gradients` in stock torch."""
    return (b.t() @ gradient) * scale, (gradient @ a.t()) * scale
