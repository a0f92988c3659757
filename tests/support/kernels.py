"""Eager code and kernels side by side: hard inputs, and both outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels.core import pool

Array = NDArray[np.generic]
KINDS = ("normal", "equal", "ties", "far", "low", "tiny", "any", "sorted")
LARGEST = np.finfo(np.float32).max

seeds = st.integers(0, 2**32 - 1)
threads = st.integers(1, 3)


@contextmanager
def using(name: str, count: int = 1) -> Iterator[None]:
    """Compute with this backend; even the smallest work is split among `count` threads."""
    least, before = pool.LEAST_NANOSECONDS, backend.active()
    try:
        pool.LEAST_NANOSECONDS = 1e-3
        backend.use(name, count)
        yield
    finally:
        pool.LEAST_NANOSECONDS = least
        backend.use(before, 1)


def values(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Finite float32 numbers of a kind that is hard for something."""
    normal = rng.standard_normal(shape)
    if kind == "equal":
        found = np.full(shape, rng.standard_normal())
    elif kind == "ties":  # few values, both zeros among them
        found = rng.choice([0.0, -0.0, 0.37, -0.37, 3.0, 20.5], shape)
    elif kind == "far":
        found = normal * 10.0 ** rng.uniform(-3, 36, (*shape[:-1], 1))
    elif kind == "low":  # what a mask of large negative numbers leaves behind
        found = np.where(rng.random(shape) < 0.7, rng.choice([-1e4, -1e9, -3e38], shape), normal)
    elif kind == "tiny":  # denormal numbers and zeros of both signs
        found = rng.integers(-50, 50, shape) * 2.0**-149 * 10.0 ** rng.integers(0, 4, shape)
        found = np.where(rng.random(shape) < 0.2, -0.0, found)
    elif kind == "any":  # all bit patterns of finite numbers
        found = rng.integers(0, 0x7F800000, shape, np.uint32).view(np.float32) * rng.choice([-1.0, 1.0], shape)
    else:
        found = normal * rng.choice([0.01, 1.0, 5.0, 100.0])
    return np.ascontiguousarray(np.sort(found, -1) if kind == "sorted" else found, dtype=np.float32)


def outcome(compute: Callable[[], list[Tensor]]) -> list[bytes] | str:
    """The raw bits of everything computed, or that the numbers were refused."""
    try:
        return [x.detach().contiguous().numpy().tobytes() for x in compute()]
    except NumericsError:
        return "refused"


def both(compute: Callable[[], list[Tensor]], count: int = 1) -> tuple[list[bytes] | str, list[bytes] | str]:
    """The outcome by the eager code and by kernels on `count` threads."""
    with using("eager"):
        expected = outcome(compute)
    with using("float64", count):
        return expected, outcome(compute)
