"""The largest kernels, called with hardly any numbers, so that they are compiled; without a model."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.kernels import decoder_trunk, gumbel, row_program, row_steps
from ppo_repro.numerics.kernels.attention import backward, forward
from ppo_repro.numerics.kernels.attention.block import Spec, cut_spans
from ppo_repro.numerics.kernels.attention.keys import Saved

_SPEC = Spec(heads=1, kv_heads=1, dim=8, scaling=1.0, saved_weights=64)
_LEAST_SPAN = 64


def backward_kernel() -> None:
    """The gradient of attention of one position that sees itself."""
    x, spans, first, last = _one_position()
    top, total = np.zeros((1, 1), np.float32), np.ones((1, 1))
    dq, dk, dv = (np.empty_like(x) for _ in range(3))
    backward.backward(0, 1, _SPEC, spans, Saved(x, x, x, x, x, top, total), first, last, dq, dk, dv)


def forward_kernel() -> None:
    """Attention of one position that sees itself."""
    x, spans, first, last = _one_position()
    top, total = np.empty((1, 1), np.float32), np.empty((1, 1))
    forward.forward(0, 1, _SPEC, spans, x, x, x, first, last, np.empty_like(x), top, total)


def _one_position() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    spans, first, last = cut_spans(np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64), _LEAST_SPAN)
    return np.ones(_SPEC.dim, np.float32), spans, first, last


def program_kernel() -> None:
    """The norm of one row, as a program of one step."""
    x, inverse = np.ones((1, 8), np.float32), np.empty(1)
    row_program.run([row_steps.norm(x, np.empty_like(x), inverse, x[0], 1e-6, 1)], 0, 1, 0.0)


def decoding_kernel() -> None:
    """A trunk without layers for one new token."""
    shape = decoder_trunk.Shape(_SPEC, 8, 8, 1e-6, 1e-6, 1e-6, 1e-6, 0, 0, 0, 1, 1, 1, 1)
    one, fields = np.ones(1, np.int64), np.zeros((0, decoder_trunk.FIELDS), np.int64)
    tokens = decoder_trunk.NewTokens(one, np.zeros((1, 1), np.int64), np.ones((1, 1), np.bool_), one[None], one)
    table, x, new = np.ones(8, np.float32), np.ones((1, 8), np.float32), np.empty((1, 2, 8), np.float32)
    decoder_trunk.run(fields, np.zeros(0, np.int64), shape, table, table, tokens, x, new)


def sampling_kernel() -> None:
    """A token out of two."""
    one = np.ones(1, np.int64)
    gumbel.sample(np.zeros((1, 2), np.float32), one, one, 1.0, None)


_FLOAT64 = (decoding_kernel, backward_kernel, program_kernel, forward_kernel, sampling_kernel)
_AMX = (backward_kernel, forward_kernel, sampling_kernel)


def compile_largest(name: str, last_first: bool = False) -> None:
    """Compile those that a backend uses, from the first to the last or from the last to the first.

    Two processes that begin at both ends share the work; what one has compiled, the other finds.
    """
    kernels = _FLOAT64 if name == "float64" else _AMX
    for compile_kernel in reversed(kernels) if last_first else kernels:
        compile_kernel()
