"""Compute correctly rounded sums and means in float64, so the order of the terms does not matter."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mean_of(values: Tensor) -> float:
    """Return the correctly rounded sum of all elements over their number; 0 for no elements."""
    flat = values.detach().to(torch.float64).reshape(-1).tolist()
    return math.fsum(flat) / len(flat) if flat else 0.0


def run_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the correctly rounded sums of consecutive runs: [N] values, `lengths` [B] with sum N -> [B] float64."""
    runs = values.detach().to(torch.float64).split(lengths.tolist())
    return torch.tensor([math.fsum(run.tolist()) for run in runs], dtype=torch.float64)
