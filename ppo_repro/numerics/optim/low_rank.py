"""Low-rank adapters (Hu et al., 2022): the merged weight that every forward pass uses, and gradients of the factors.

W' = W + s B A, A [r, K], B [N, r]. Other implementations compute x W^T + s (x A^T) B^T in training and merge for
generation, which round differently. Here every pass uses the merged matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics.arithmetic.grid import INPUT_BITS, contract, exact_product, quantise

FACTOR_BITS = 24  # of the right operand; the left one has INPUT_BITS
# numbers of a matrix at a time: whole matrices would need several copies in float64
_AT_ONCE = 1 << 18


def merge(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W' = fl32(W + s fl64(sum_j B[n, j] A[j, k])), the sum exact on the grids of B's rows and A's columns.

    base [N, K], a [r, K], b [N, r] float32 -> [N, K] float32. Where the sum is zero, W' has the bits of W, including
    the sign of zero. Raises NumericsError if a factor is not finite.
    """
    (rows, row_scale), (columns, column_scale) = quantise(b, INPUT_BITS), quantise(a.t(), FACTOR_BITS)
    result = torch.empty_like(base, memory_format=torch.contiguous_format)
    for part in _blocks(*base.shape):
        product = exact_product(rows[part], columns.t()).mul_(row_scale[part]).mul_(column_scale.t())
        merged = (base[part].to(torch.float64) + product * scale).to(torch.float32)
        result[part] = torch.where(product == 0, base[part], merged)
    return result


def _blocks(rows: int, columns: int) -> list[slice]:
    """The rows of a matrix, as many at a time as hold _AT_ONCE numbers."""
    size = max(1, _AT_ONCE // columns)
    return [slice(start, start + size) for start in range(0, rows, size)]


def factor_gradients(gradient: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """dA = s B^T dW' and dB = s dW' A^T, each sum exact; gradient [N, K] -> float32 [r, K], [N, r].

    They are functions of dW' alone, so they do not depend on how the work was split up.
    """
    d_a, d_b = _by_rows(gradient.t(), quantise(b.t(), FACTOR_BITS)), _by_rows(gradient, quantise(a, FACTOR_BITS))
    return d_a.t().contiguous() * scale, d_b * scale


def _by_rows(gradient: Tensor, factor: tuple[Tensor, Tensor]) -> Tensor:
    """The contraction of the rows of a gradient with those of a factor on its grid."""
    # the gradient gets the more bits: its rows and columns reach over more powers of two than a factor's
    return torch.cat([contract(quantise(gradient[part], INPUT_BITS), factor) for part in _blocks(*gradient.shape)])


def merge_native(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`merge` in stock torch."""
    return base + (b @ a) * scale


def factor_gradients_native(gradient: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`factor_gradients` in stock torch."""
    return (b.t() @ gradient) * scale, (gradient @ a.t()) * scale
