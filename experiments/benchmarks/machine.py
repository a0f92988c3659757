"""What this machine can do at most, measured: the floors that benchmarks are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels.amx import operands, product


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median wall seconds of one call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)


@dataclass(frozen=True)
class Peaks:
    """Multiply-accumulates per second of large products on the given threads, and bytes per second read."""

    threads: int
    float32: float
    float64: float
    exact_amx: float  # products of 20-bit integers; 0 without AMX
    bandwidth: float


def measure(threads: int) -> Peaks:
    """Large square-ish products, weights packed in advance; a sum over 256 MB for the bandwidth."""
    m, k, n = 512, 1024, 1024
    torch.set_num_threads(threads)
    a, b = torch.randn(m, k), torch.randn(k, n)
    a64, b64 = a.double(), b.double()
    work = float(m * k * n)
    float32 = work / seconds(lambda: a @ b, 15)
    float64 = work / seconds(lambda: a64 @ b64, 15)
    big = torch.ones(1 << 26)
    bandwidth = big.numel() * 4 / seconds(big.sum, 7)
    exact = 0.0
    if backend.has_amx():
        backend.use("amx", threads)
        packed, y = operands.pack(b.t().contiguous().numpy(), 20, along_rows=True), np.empty((m, n), np.float32)
        exact = work / seconds(
            lambda: product.contract(operands.quantise_rows(a.numpy(), packed.p), packed, product.NO_BIAS, y), 15
        )
    return Peaks(threads, float32, float64, exact, bandwidth)
