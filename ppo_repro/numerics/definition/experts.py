"""Compute rule 7, experts: the choice of each token's experts, and the order in which their results are added."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, F, exp32, fma
from ppo_repro.numerics.definition.gradients import Contributions
from ppo_repro.numerics.definition.linear import layer_linear, linear_backward
from ppo_repro.numerics.definition.mlp import Mlp, mlp, mlp_backward
from ppo_repro.numerics.definition.model import Layer, Model
from ppo_repro.numerics.definition.rounding import rounded
from ppo_repro.numerics.definition.row_sums import row_sum


@dataclass(frozen=True)
class Mixture:
    """Intermediate results of a mixture: rows x [T, H], experts [T, k] by rising index, softmax p, weights [T, k].

    p is [T, k] over the chosen experts if the model normalises, else [T, E]. `parts` has for each expert the indices of
    its rows, the columns of the expert in `experts`, outputs and MLP.
    """

    x: Array
    experts: Array
    p: Array
    weights: Array
    parts: tuple[tuple[Array, Array, Array, Mlp], ...]


def choose(logits: Array, count: int) -> Array:
    """Choose experts by rule 7: the `count` largest logits of each row, as rising indices [T, k].

    If two logits are equal, the lower index wins.

    Kernel: `choose`.
    """
    return np.sort(np.argsort(-logits, -1, kind="stable")[:, :count], -1)


def softmax(logits: Array) -> Array:
    """Compute p = exp(z - largest) / float32(sum) of each row. Kernel: `routing_weights`."""
    e = exp32(logits - logits.max(-1, keepdims=True))
    return e / row_sum(e).astype(F)[..., None]


def mixture(model: Model, layer: Layer, x: Array, given: Array | None) -> tuple[Array, Mixture]:
    """Compute rule 7: out = sum_e w[e] expert_e(x) by rising e, a chain of fma(w, y, acc) from +0.

    Kernel: `mixture_forward`.

    Args:
        model: number of experts, activation.
        layer: weights of router and experts.
        x: [T, H].
        given: [T, k], the experts of each token; None: the router chooses.
    """
    assert layer.router is not None
    logits = layer_linear(model, x, layer.router)
    experts = choose(logits, model.chosen) if given is None else given
    p = softmax(np.take_along_axis(logits, experts, -1) if model.normalised else logits)
    weights = rounded(model.rounding.activations, p if model.normalised else np.take_along_axis(p, experts, -1))
    out, parts = np.zeros_like(x), []
    for e, (up, down) in enumerate(zip(layer.expert_up, layer.expert_down, strict=True)):
        rows, rank = np.nonzero(experts == e)
        y, inside = mlp(model, up, down, x[rows])
        out[rows] = fma(weights[rows, rank][:, None], y, out[rows])
        parts.append((rows, rank, y, inside))
    return rounded(model.rounding.activations, out), Mixture(x, experts, p, weights, tuple(parts))


def mixture_backward(
    grads: Contributions, name: str, model: Model, layer: Layer, dy: Array, of: Mixture, position: Array
) -> Array:
    """Return the gradient of x [T, H]: the router's gradient, plus each chosen expert's gradient by rising index.

    d y_e = w dy; g = d w_e = float32(y_e . dy); d logits = p (g - float32(sum p g)), g = 0 if not chosen.

    Kernel: `mixture_backward`.

    Args:
        grads: receives the addends of weights.
        name: name of the layer, a prefix in `grads`.
        model: number of experts, activation.
        layer: weights.
        dy: [T, H].
        of: the result of `mixture`.
        position: [T], position of each row.
    """
    assert layer.router is not None
    g = np.zeros_like(of.weights)
    for rows, rank, y, _ in of.parts:
        g[rows, rank] = row_sum(y, dy[rows]).astype(F)
    mean = row_sum(of.weights, g).astype(F)[:, None]
    d_logits = np.zeros((len(dy), len(layer.router.w)), F)
    np.put_along_axis(d_logits, of.experts, of.p * (g - mean) if model.normalised else g, -1)
    if not model.normalised:
        d_logits = of.p * (d_logits - mean)
    dx = linear_backward(grads, f"{name}.router", layer.router, d_logits, of.x, position)
    for e, (rows, rank, _, inside) in enumerate(of.parts):
        d = of.weights[rows, rank][:, None] * dy[rows]
        names = (f"{name}.expert_up.{e}", f"{name}.expert_down.{e}")
        up, down = layer.expert_up[e], layer.expert_down[e]
        dx[rows] = dx[rows] + mlp_backward(grads, names, model, up, down, d, inside, position[rows])
    return dx
