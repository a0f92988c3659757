"""Matrices that are hard on number grids and on vectorised loops."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.numerics.arithmetic.grid import WEIGHT_BITS
from tests.support.models import seeded

FLAVOURS = ("normal", "ties", "denormal", "zeros", "signed zeros", "full range", "wide", "powers", "largest")
STRIDES = ("plain", "transposed", "sliced", "reversed pages", "expanded")


def _row(flavour: str, n: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(n, generator=generator)
    if flavour == "ties":  # multiples of half a unit of the grid of weights that reach 1
        x = torch.randint(-(2**8), 2**8, (n,), generator=generator) * 2.0 ** -(WEIGHT_BITS + 1)
        x[0] = 0.75
    elif flavour == "denormal":
        x = x * 2.0**-130
    elif flavour == "zeros":
        x = torch.zeros(n)
    elif flavour == "signed zeros":
        x = torch.where(x < 0, -0.0, 0.0)
    elif flavour == "full range":
        x = x * 2.0 ** torch.randint(-60, 61, (n,), generator=generator)
    elif flavour == "wide":
        x = x * 2.0 ** torch.randint(-25, 1, (n,), generator=generator)
    elif flavour == "powers":
        x = torch.sign(x) * 2.0 ** torch.randint(-12, 13, (n,), generator=generator)
    elif flavour == "largest":
        x = torch.sign(x) * (2.0 - 2.0**-23) * 2.0**40
    return x


def matrix(rows: int, columns: int, seed: int, stride: str) -> Tensor:
    """float32 [rows, columns], each row of a flavour of its own, not contiguous unless `stride` is plain."""
    generator = seeded(seed)
    kinds = torch.randint(0, len(FLAVOURS), (rows,), generator=generator).tolist()
    x = torch.stack([_row(FLAVOURS[k], columns, generator) for k in kinds])
    if stride == "transposed":
        return x.t().contiguous().t()
    if stride == "sliced":
        return torch.stack([x, -x], -1)[..., 0]
    if stride == "reversed pages":
        return torch.cat([torch.ones(3, columns), x, torch.ones(2, columns)])[3 : 3 + rows]
    return x[:1].expand(rows, columns) if stride == "expanded" else x


cases = st.tuples(st.integers(1, 130), st.integers(0, 2**31), st.sampled_from(STRIDES))
