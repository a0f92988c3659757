"""The product of a linear layer: inputs and weights on grids, their outliers beside them.

A grid follows the largest number of its row. Where a few numbers lie far above the others, the others would lose the
bits that float32 keeps. So these few, the outliers of a row, are left out of the grid and out of the exact sum. Their
products, which float64 holds exactly, are added one after another by rising column. Which numbers are outliers depends
on the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
    has_outliers: bool


@cache  # a step of a small model asks twenty thousand times
def most_outliers(terms: int) -> int:
    """How many outliers a row of `terms` numbers may have, fewer than it has numbers."""
    return min(max(LEAST_OUTLIERS, terms // OUTLIER_SHARE), terms - 1)


def _operand(x: Tensor, bits: int, gap: int, room: float, where: str) -> Operand:
    magnitudes = x.abs()
    require_finite(magnitudes.amax(-1, keepdim=True) * room, where)
    count = most_outliers(x.shape[-1]) + 1
    tops = exponent(magnitudes.topk(min(count, x.shape[-1]), -1).values * room)
    highest, others = tops[..., :1], tops[..., -1:]
    has_outliers = highest - others >= gap
    e = torch.where(has_outliers, others, highest)
    outliers = exponent(magnitudes * room) > e
    integers = (x.to(torch.float64) * pow2(bits - e)).round_().masked_fill_(outliers, 0.0)
    return Operand(x, integers, pow2(e - bits), outliers, bool(has_outliers.any()))


def input_operand(x: Tensor, where: str) -> Operand:
    """Inputs x [M, K] float32 on grids of 26 bits; NumericsError naming `where` if one is not finite."""
    return _operand(x, INPUT_BITS, INPUT_GAP, 1.0, where)


def weight_operand(w: Tensor, where: str) -> Operand:
    """Weights w [N, K] float32 on grids of 23 bits; otherwise as `input_operand`."""
    return _operand(w, WEIGHT_BITS, WEIGHT_GAP, ROOM, where)


def linear(x: Operand, w: Operand, bias: Tensor | None = None) -> Tensor:
    """sum_k x[m, k] w[n, k] [+ bias[n]] -> [M, N] float32.

    y = fl32(exact sum) + 0 [+ bias], then y + o rounded once, where o is the sum in float64 of the products with an
    outlier: first of the input's by rising k, then of the weight's others by rising k.
    """
    y = contract((x.integers, x.scale), (w.integers, w.scale))
    if bias is not None:
        y = y + bias
    if not (x.has_outliers or w.has_outliers):
        return y
    columns = _outlier_columns(x, w)
    return (y.to(torch.float64) + _outlier_sums(*columns)).to(torch.float32)


def _outlier_columns(x: Operand, w: Operand) -> tuple[Tensor, ...]:
    """The columns in which a row of either operand has an outlier: values and outliers of x, then those of w."""
    found = (x.outliers.any(0) | w.outliers.any(0)).nonzero()[:, 0]
    return tuple(part[:, found] for part in (x.values, x.outliers, w.values, w.outliers))


def _outlier_sums(x: Tensor, x_outliers: Tensor, w: Tensor, w_outliers: Tensor) -> Tensor:
    """The products with an outlier, x [M, C] and w [N, C] -> [M, N] float64, added by rising column."""
    total = torch.zeros(len(x), len(w), dtype=torch.float64, device=x.device)
    for k in x_outliers.any(0).nonzero()[:, 0].tolist():
        total += torch.where(x_outliers[:, k, None], _products(x, w, k), 0.0)
    for k in w_outliers.any(0).nonzero()[:, 0].tolist():
        total += torch.where(w_outliers[:, k] & ~x_outliers[:, k, None], _products(x, w, k), 0.0)
    return total


def _products(x: Tensor, w: Tensor, k: int) -> Tensor:
    return x[:, k, None].to(torch.float64) * w[:, k].to(torch.float64)
