"""Layers of few weights as programs over rows: two calls forward and two backward, beside those of attention.

It computes what `layer_forward` and the backward of `training` do, kernel by kernel, so every bit is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.gradient_bins import GradientBins
from ppo_repro.numerics.kernels import row_program, row_steps
from ppo_repro.numerics.kernels.row_steps import Step
from ppo_repro.numerics.trunk.backward_program import BackwardProgram, Infinite, cost_of, matrix_of
from ppo_repro.numerics.trunk.layer import Activations, Attend, LinearInput, NormResult, Rotary
from ppo_repro.numerics.trunk.weights import Layer, LinearWeights, NormWeights

MOST_WEIGHTS = 1 << 22  # of a layer: packed for its backward pass, all of them lie in memory at once
_FIRST, _SECOND, _THIRD = range(row_steps.SCRATCH)


class Gradients(NamedTuple):
    """The gradient of a layer's input, and of the results of its linear layers, each with the exponents of its rows."""

    x: np.ndarray
    of_results: list[tuple[LinearWeights, LinearInput, LinearInput]]  # the layer, its input, the gradient


def run_as_programs(layer: Layer) -> bool:
    """Whether a layer is run so: products in float64, few weights, and gradients on one grid per tensor."""
    few = sum(linear.weight.numel() for linear in layer.linears) <= MOST_WEIGHTS
    in_bins = any(isinstance(norm.accumulator, GradientBins) for norm in layer.norms)
    return few and backend.active() == "float64" and not in_bins


def _normed(norm: NormWeights, x: np.ndarray) -> tuple[NormResult, Step]:
    """A norm of each row of x, or of each head, and the step that computes it."""
    size = len(norm.values)
    rows, heads = x.reshape(-1, size), x.shape[1] // size
    result = NormResult(rows, np.empty_like(rows), np.empty(len(rows)))
    return result, row_steps.norm(rows, result.y, result.inverse, norm.values, norm.eps, heads)


def _products(linears: Sequence[LinearWeights], x: np.ndarray) -> tuple[list[np.ndarray], LinearInput, list[Step]]:
    """The results of linear layers with one input, and the steps that compute them."""
    shared = LinearInput(x, np.empty(len(x), np.int64))
    results = [np.empty((len(x), linear.weight.shape[0]), np.float32) for linear in linears]
    steps = [row_steps.grid(x, shared.exponents)]
    for linear, y in zip(linears, results, strict=True):
        steps.append(row_steps.product(x, matrix_of(linear, False), linear.bias_values, y))
    return results, shared, steps


def _run(steps: Sequence[Step], rows: int, nanoseconds: float) -> None:
    if row_program.run(steps, 0, rows, nanoseconds) is None:
        raise Infinite


def forward(
    layer: Layer, x: np.ndarray, rotary: Rotary, attend: Attend, rows: np.ndarray | None
) -> tuple[np.ndarray, Activations] | None:
    """`layer_forward`; None where it raises NumericsError."""
    try:
        return _forward(layer, x, rotary, attend, rows)
    except (Infinite, NumericsError):
        return None


def _forward(
    layer: Layer, x: np.ndarray, rotary: Rotary, attend: Attend, rows: np.ndarray | None
) -> tuple[np.ndarray, Activations]:
    linears = layer.query, layer.key, layer.value
    attention_norm, step = _normed(layer.attention_norm, x)
    (query, key, value), attention_input, steps = _products(linears, attention_norm.y)
    steps.insert(0, step)
    head_norms: list[NormResult | None] = []
    for norm, states in ((layer.query_norm, query), (layer.key_norm, key)):
        result = None
        if norm is not None:
            result, step = _normed(norm, states)
            steps.append(step)
        head_norms.append(result)
    query_norm, key_norm = head_norms
    query = query if query_norm is None else query_norm.y.reshape(query.shape)
    key = key if key_norm is None else key_norm.y.reshape(key.shape)
    for states in (query, key):
        steps.append(row_steps.rotate(states, rotary.positions, rotary.cosine, rotary.sine, layer.spec.dim))
    _run(steps, len(x), cost_of(linears))
    attended = attend(layer, query, key, value)
    values = attended.values.reshape(query.shape)
    if rows is not None:
        x, values = x[rows], values[rows]
    down, after = _after_attention(layer, x, values)
    before = rows, attention_norm, attention_input, query_norm, key_norm, query, key, value, attended
    return down, Activations(*before, *after)


class _AfterAttention(NamedTuple):
    """The last fields of `Activations`."""

    out_input: LinearInput
    mlp_norm: NormResult
    mlp_input: LinearInput
    gate: np.ndarray
    up: np.ndarray
    down_input: LinearInput


def _after_attention(layer: Layer, x: np.ndarray, attended: np.ndarray) -> tuple[np.ndarray, _AfterAttention]:
    """A layer's result, given that of attention."""
    hidden = np.empty_like(x)
    out_input = LinearInput(attended, np.empty(len(x), np.int64))
    mlp_norm, norm_step = _normed(layer.mlp_norm, hidden)
    (gate, up), mlp_input, to_wide = _products((layer.gate, layer.up), mlp_norm.y)
    inner, result = np.empty_like(gate), np.empty_like(x)
    down_input = LinearInput(inner, np.empty(len(x), np.int64))
    steps = [
        row_steps.grid(attended, out_input.exponents),
        row_steps.product(attended, matrix_of(layer.out, False), layer.out.bias_values, _FIRST),
        row_steps.add(_FIRST, x, hidden, x.shape[1]),
        norm_step,
        *to_wide,
        row_steps.silu_times(gate, up, inner),
        row_steps.grid(inner, down_input.exponents),
        row_steps.product(inner, matrix_of(layer.down, False), layer.down.bias_values, _FIRST),
        row_steps.add(_FIRST, hidden, result, x.shape[1]),
    ]
    _run(steps, len(x), cost_of((layer.out, layer.gate, layer.up, layer.down)))
    return result, _AfterAttention(out_input, mlp_norm, mlp_input, gate, up, down_input)


# the gradient of attention's result, for all tokens -> those of query, key and value, rotated
Differentiate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


def backward(
    layer: Layer, a: Activations, grad: np.ndarray, rotary: Rotary, differentiate: Differentiate
) -> Gradients | None:
    """Gradients of a layer, given that of its result [m, H]; None where a number is not finite.

    Those of the norms' weights go to their accumulators.
    """
    try:
        return _backward(layer, a, grad, rotary, differentiate)
    except Infinite:
        return None


def _backward(
    layer: Layer, a: Activations, grad: np.ndarray, rotary: Rotary, differentiate: Differentiate
) -> Gradients:
    d_middle, d_attended = np.empty_like(grad), np.empty_like(a.out_input.values)
    mlp = _back_through_mlp(layer, a, grad, d_middle, d_attended)
    found = mlp.run(len(grad))
    if a.rows is not None:
        d_middle, d_attended = (among_all(d, a.rows, len(a.query)) for d in (d_middle, d_attended))
    dx = np.empty_like(d_middle)
    attention = _back_through_attention(layer, a, d_middle, differentiate(d_attended), rotary, dx)
    attention.keep_norms(attention.run(len(dx)))
    mlp.keep_norms(found)
    return Gradients(dx, mlp.of_results + attention.of_results)


def _back_through_mlp(
    layer: Layer, a: Activations, grad: np.ndarray, d_middle: np.ndarray, d_attended: np.ndarray
) -> BackwardProgram:
    """From the layer's result to that of attention; `d_middle` is the gradient of what is between the two halves."""
    program, hidden = BackwardProgram(), grad.shape[1]
    d_gate, d_up = np.empty_like(a.gate), np.empty_like(a.up)
    program.through_linear(layer.down, a.down_input, grad, _FIRST)
    program.add(row_steps.silu_times_backward(_FIRST, a.gate, a.up, d_gate, d_up))
    program.through_linear(layer.up, a.mlp_input, d_up, _FIRST)
    program.through_linear(layer.gate, a.mlp_input, d_gate, _SECOND)
    program.add(row_steps.add(_FIRST, _SECOND, _THIRD, hidden))
    program.through_norm(layer.mlp_norm, a.mlp_norm, _THIRD, _FIRST)
    program.add(row_steps.add(grad, _FIRST, d_middle, hidden))
    program.through_linear(layer.out, a.out_input, d_middle, d_attended)
    return program


def _back_through_attention(
    layer: Layer,
    a: Activations,
    d_middle: np.ndarray,
    rotated: tuple[np.ndarray, np.ndarray, np.ndarray],
    rotary: Rotary,
    dx: np.ndarray,
) -> BackwardProgram:
    """From the gradients of query, key and value to that of the layer's input."""
    program, hidden, (dq, dk, dv) = BackwardProgram(), dx.shape[1], rotated
    states = []
    for norm, result, rotated_states in ((layer.query_norm, a.query_norm, dq), (layer.key_norm, a.key_norm, dk)):
        d = rotated_states
        program.add(row_steps.rotate(d, rotary.positions, rotary.cosine, rotary.sine, layer.spec.dim, back=True))
        if norm is not None and result is not None:
            d = np.empty_like(rotated_states)
            program.through_norm(norm, result, rotated_states, d, d.shape[1] // len(norm.values))
        states.append(d)
    # in the order in which autograd adds the three
    program.through_linear(layer.value, a.attention_input, dv, _FIRST)
    program.through_linear(layer.key, a.attention_input, states[1], _SECOND)
    program.add(row_steps.add(_FIRST, _SECOND, _THIRD, hidden))
    program.through_linear(layer.query, a.attention_input, states[0], _FIRST)
    program.add(row_steps.add(_THIRD, _FIRST, _SECOND, hidden))
    program.through_norm(layer.attention_norm, a.attention_norm, _SECOND, _FIRST)
    program.add(row_steps.add(d_middle, _FIRST, dx, hidden))
    return program


def among_all(x: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """x in the given rows of [count, ..], zeros in the others."""
    result = np.zeros((count, x.shape[1]), np.float32)
    result[rows] = x
    return result
