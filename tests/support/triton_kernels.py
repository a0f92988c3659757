"""Triton's kernels in its interpreter, on tensors of the CPU; tests that import this are skipped without Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs Triton: pip install 'ppo_repro[gpu]'")

from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels.triton.launch import INTERPRETED

if not INTERPRETED:  # the environment said TRITON_INTERPRET=0
    pytest.skip("Triton compiles here: TRITON_INTERPRET is not 1", allow_module_level=True)


@contextmanager
def as_on_a_card() -> Iterator[None]:
    """NumPy, in which the interpreter computes, says nothing where a number leaves its range, like a card."""
    with np.errstate(all="ignore"):
        yield


@contextmanager
def using_triton() -> Iterator[None]:
    """The backend is Triton's kernels."""
    before = backend.active()
    try:
        backend.use("triton", 1)
        with as_on_a_card():
            yield
    finally:
        backend.use(before, 1)
