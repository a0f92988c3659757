"""Sums that depend on the order of their terms on every processor: controls of what must not depend on it."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def sum_in_order(terms: Tensor, dim: int = 0) -> Tensor:
    """One term after the other, each partial sum rounded; a library is free to add in any order."""
    return reduce(torch.add, terms.unbind(dim))


def product_in_order(a: Tensor, b: Tensor) -> Tensor:
    """a b for a [n, k] and b [k, m], the k products added in order."""
    return sum_in_order(a.T[:, :, None] * b[:, None, :])
