"""Exact attention by kernels: torch tensors on a CPU to flat NumPy arrays and back, over all threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.errors import NumericsError
from ppo_repro.kernels import attention as forward_kernels
from ppo_repro.kernels import attention_backward as backward_kernels
from ppo_repro.kernels import pool
from ppo_repro.kernels.attention_block import Spec
from ppo_repro.numerics.grid import folded_bits, operand_bits

INFINITY_BITS = 0x7F800000
# a rough cost, to decide how many threads are worth waking: a score is one row of D products, twice
NANOSECONDS_PER_PRODUCT = 0.05


def _flat(x: Tensor) -> np.ndarray:
    """[R, H, L, D] as flat [R, L, H, D]: no copy of what transformers makes of a projection."""
    return x.detach().transpose(1, 2).contiguous().numpy().reshape(-1)


def _spec(heads: int, kv_heads: int, dim: int, scaling: float, context: int) -> Spec:
    key_bits, query_bits = folded_bits(context), folded_bits(context * (heads // kv_heads))
    return Spec(heads, kv_heads, dim, float(scaling), operand_bits(dim), key_bits, query_bits)


def _in_parts(kernel: Callable[[int, int], int], rows: int, products: float, what: str) -> None:
    """Run a kernel over rows; NumericsError if a number it met is not finite."""

    def part(begin: int, end: int) -> None:
        if kernel(begin, end) >= INFINITY_BITS:
            raise NumericsError(f"{what} are not finite: the weights or the inputs have left the range of float32")

    pool.in_parts(part, rows, products * NANOSECONDS_PER_PRODUCT)
