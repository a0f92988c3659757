"""The product of a linear layer: inputs and weights on grids, their outliers beside them.

A grid follows the largest number of its row. Where a few numbers lie far above the others, the others would lose the
bits that float32 keeps. So these few, the outliers of a row, are left out of the grid and out of the exact sum. Their
products, which float64 holds exactly, are added one after another by rising column. Which numbers are outliers depends
on the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.numerics.arithmetic.elementwise import pow2
from ppo_repro.numerics.arithmetic.grid import (
    INPUT_BITS,
    INPUT_GAP,
    LEAST_OUTLIERS,
    OUTLIER_SHARE,
    ROOM,
    WEIGHT_BITS,
    WEIGHT_GAP,
    contract,
    exponent,
    require_finite,
)


@dataclass(frozen=True)
class Operand:
    """Rows of inputs or weights [R, K] on their grids."""

    values: Tensor  # float32, as they came
    integers: Tensor  # float64, 0 for outliers
    scale: Tensor  # float64 [R, 1]
    outliers: Tensor  # bool


def most_outliers(terms: int) -> int:
    """How many outliers a row of `terms` numbers may have, fewer than it has numbers."""
    return min(max(LEAST_OUTLIERS, terms // OUTLIER_SHARE), terms - 1)


def _operand(x: Tensor, bits: int, gap: int, room: float, where: str) -> Operand:
    magnitudes = x.abs()
    require_finite(magnitudes.amax(-1, keepdim=True) * room, where)
    tops = exponent(magnitudes.topk(most_outliers(x.shape[-1]) + 1, -1).values * room)
    highest, others = tops[..., :1], tops[..., -1:]
    e = torch.where(highest - others >= gap, others, highest)
    outliers = exponent(magnitudes * room) > e
    integers = (x.to(torch.float64) * pow2(bits - e)).round_().masked_fill_(outliers, 0.0)
    return Operand(x, integers, pow2(e - bits), outliers)


def input_operand(x: Tensor, where: str) -> Operand:
    """Inputs x [M, K] float32 on grids of 26 bits; NumericsError naming `where` if one is not finite."""
    return _operand(x, INPUT_BITS, INPUT_GAP, 1.0, where)


def weight_operand(w: Tensor, where: str) -> Operand:
    """Weights w [N, K] float32 on grids of 23 bits; NumericsError naming `where` if one is not finite."""
    return _operand(w, WEIGHT_BITS, WEIGHT_GAP, ROOM, where)


def linear(x: Operand, w: Operand, bias: Tensor | None = None) -> Tensor:
    """sum_k x[m, k] w[n, k] [+ bias[n]] -> [M, N] float32.

    y = fl32(exact sum) + 0 [+ bias], then y + o rounded once, where o is the sum in float64 of the products with an
    outlier: first of the input's by rising k, then of the weight's others by rising k.
    """
    y = contract((x.integers, x.scale), (w.integers, w.scale))
    if bias is not None:
        y = y + bias
    if not (x.outliers.any() or w.outliers.any()):
        return y
    return (y.to(torch.float64) + _outlier_sums(x, w)).to(torch.float32)


def _outlier_sums(x: Operand, w: Operand) -> Tensor:
    total = torch.zeros(len(x.values), len(w.values), dtype=torch.float64, device=x.values.device)
    for k in x.outliers.any(0).nonzero()[:, 0].tolist():
        total += torch.where(x.outliers[:, k, None], _products(x, w, k), 0.0)
    for k in w.outliers.any(0).nonzero()[:, 0].tolist():
        total += torch.where(w.outliers[:, k] & ~x.outliers[:, k, None], _products(x, w, k), 0.0)
    return total


def _products(x: Operand, w: Operand, k: int) -> Tensor:
    return x.values[:, k, None].to(torch.float64) * w.values[:, k].to(torch.float64)
