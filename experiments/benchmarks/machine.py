"""The peak rates of this machine, measured: benchmarks compare themselves with the floors that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from experiments.benchmarks.timing import median_seconds
from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels.amx import operands, product


@dataclass(frozen=True)
class Peaks:
    """Multiply-accumulates per second of large products on `threads`, and bytes read per second."""

    threads: int
    float32: float
    float64: float
    exact_amx: float  # products of integers of 26 and 23 bits; 0 without AMX
    bandwidth: float


def measure(threads: int) -> Peaks:
    """The rates of large products with weights packed in advance, and of a sum over 256 MB for the bandwidth."""
    m, k, n = 512, 1024, 1024
    torch.set_num_threads(threads)
    a, b = torch.randn(m, k), torch.randn(k, n)
    a64, b64 = a.double(), b.double()
    work = float(m * k * n)
    float32 = work / median_seconds(lambda: a @ b, 15)
    float64 = work / median_seconds(lambda: a64 @ b64, 15)
    big = torch.ones(1 << 26)
    bandwidth = big.numel() * 4 / median_seconds(big.sum, 7)
    exact = 0.0
    if backend.has_amx():
        backend.use("amx", threads)
        packed, y = operands.pack(b.t().contiguous().numpy(), along_rows=True), np.empty((m, n), np.float32)
        no_bias = np.empty(0, np.float32)
        exact = work / median_seconds(
            lambda: product.contract(operands.quantise_rows(a.numpy()), packed, no_bias, y), 15
        )
    return Peaks(threads, float32, float64, exact, bandwidth)
