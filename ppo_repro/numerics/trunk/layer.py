"""One decoder layer over arrays, kernel after kernel: the same code for training, prefill and decoding.

The kernels and their order are those of the lowered modules, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.kernels import layer_parts
from ppo_repro.numerics.layers.fused_attention import NOT_FINITE
from ppo_repro.numerics.layers.norms import input_not_finite, rms_normed
from ppo_repro.numerics.products import operand as prepare_operand
from ppo_repro.numerics.trunk.weights import Layer, LinearWeights, NormWeights, Trunk


class Rotary(NamedTuple):
    """Tables of cosine and sine [P, D] float32, and the position of each token, int64 [n]."""

    cosine: np.ndarray
    sine: np.ndarray
    positions: np.ndarray


class NormResult(NamedTuple):
    """A norm's input [n, H], its result and 1 / sqrt(mean(x^2) + eps), float64 [n]."""

    x: np.ndarray
    y: np.ndarray
    inverse: np.ndarray


class LinearInput(NamedTuple):
    """The input of linear layers [n, K], and the exponents of its rows, int64 [n]."""

    values: np.ndarray
    exponents: np.ndarray


class Attended(NamedTuple):
    """The result of attention, flat [n, H, D], and each query's largest score and sum of weights for a backward."""

    values: np.ndarray
    largest: np.ndarray | None = None
    total: np.ndarray | None = None


class Activations(NamedTuple):
    """What the backward of a layer needs."""

    rows: np.ndarray | None  # rows kept after attention; None for all
    attention_norm: NormResult
    attention_input: LinearInput
    query_norm: NormResult | None
    key_norm: NormResult | None
    query: np.ndarray  # [n, H D], rotated
    key: np.ndarray
    value: np.ndarray
    attended: Attended
    out_input: LinearInput
    mlp_norm: NormResult
    mlp_input: LinearInput
    gate: np.ndarray
    up: np.ndarray
    down_input: LinearInput


# attention of a layer: query [n, H D], key and value [n, Hk D] float32 -> flat [n, H, D]
Attend = Callable[[Layer, np.ndarray, np.ndarray, np.ndarray], Attended]


def rotary_at(trunk: Trunk, positions: np.ndarray) -> Rotary:
    """The rotary tables at `positions` [n] int64; IndexError for a position beyond them."""
    last = int(positions.max())
    if last >= len(trunk.cosine):
        raise IndexError(f"position {last}: rotary tables have {len(trunk.cosine)}")
    return Rotary(trunk.cosine, trunk.sine, positions)


def normalise(norm: NormWeights, x: np.ndarray) -> NormResult:
    """The norm of each row of x [n, H] float32; NumericsError where x is not finite."""
    return NormResult(x, *rms_normed(x, norm.values, norm.eps, norm.name))


def products(layers: Sequence[LinearWeights], x: np.ndarray) -> tuple[list[np.ndarray], LinearInput]:
    """x W^T + b, float32, of layers that share the input x [n, K]; it is put on its grid once.

    Raises NumericsError where x or a weight is not finite.
    """
    operand = prepare_operand(x)
    results = [layer.prepared.product(operand, layer.weight, 1, layer.bias_values) for layer in layers]
    return results, LinearInput(x, operand.exponents)


def layer_forward(
    layer: Layer, x: np.ndarray, rotary: Rotary, attend: Attend, rows: np.ndarray | None = None
) -> tuple[np.ndarray, Activations]:
    """A layer's result for tokens x [n, H] float32, which stays as it is; after attention for `rows` [m] alone.

    h = x + out(attend(rotate(norm(x)))), y = h + down(silu(gate(norm(h))) up(norm(h))). In the last layer rows that
    nobody reads can be left out, since no later attention looks at them. Raises NumericsError naming the first
    operation whose input is not finite.
    """
    attention_norm = normalise(layer.attention_norm, x)
    (query, key, value), attention_input = products((layer.query, layer.key, layer.value), attention_norm.y)
    query, query_norm = _head_norm(layer.query_norm, query)
    key, key_norm = _head_norm(layer.key_norm, key)
    for states in (query, key):  # in place: nothing reads them unrotated
        layer_parts.rotate(states, rotary.cosine, rotary.sine, rotary.positions, layer.spec.dim)
    try:
        attended = attend(layer, query, key, value)
    except NumericsError as error:
        raise NumericsError(f"layer {layer.index}: {error}") from None
    values = attended.values.reshape(query.shape)
    if rows is not None:
        x, values = x[rows], values[rows]
    (out,), out_input = products((layer.out,), values)
    out += x
    mlp_norm = normalise(layer.mlp_norm, out)
    (gate, up), mlp_input = products((layer.gate, layer.up), mlp_norm.y)
    (down,), down_input = products((layer.down,), layer_parts.silu_times(gate, up))
    activations = Activations(
        rows, attention_norm, attention_input, query_norm, key_norm, query, key, value, attended, out_input,
        mlp_norm, mlp_input, gate, up, down_input,
    )  # fmt: skip
    down += mlp_norm.x
    return down, activations


def _head_norm(norm: NormWeights | None, x: np.ndarray) -> tuple[np.ndarray, NormResult | None]:
    """The norm of each head of x [n, H D]; x itself without one."""
    if norm is None:
        return x, None
    result = normalise(norm, x.reshape(-1, len(norm.values)))
    return result.y.reshape(x.shape), result


def layer_not_finite(layer: Layer, status: int) -> NumericsError:
    """The error that `layer_forward` raises, given what a kernel of a whole layer found not finite."""
    norms = {
        layer_parts.BEFORE_ATTENTION: layer.attention_norm,
        layer_parts.QUERY_NORM: layer.query_norm,
        layer_parts.KEY_NORM: layer.key_norm,
        layer_parts.BEFORE_MLP: layer.mlp_norm,
    }
    if status == layer_parts.ATTENTION:
        return NumericsError(f"layer {layer.index}: {NOT_FINITE}")
    norm = norms.get(status)
    if norm is not None:
        return input_not_finite(norm.name)
    linears = {layer_parts.QUERY: layer.query, layer_parts.OUT: layer.out, layer_parts.GATE: layer.gate}
    linear = linears.get(status, layer.down)
    return NumericsError(f"the input or the weight of {linear.prepared.name} is not finite")
