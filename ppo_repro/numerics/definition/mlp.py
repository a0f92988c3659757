"""Compute the MLP of a layer, or of one expert: up, activation, down. Products follow rule 1, the activation rule 5."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.definition.elementary import Array
from ppo_repro.numerics.definition.gradients import Contributions
from ppo_repro.numerics.definition.linear import layer_linear, linear_backward
from ppo_repro.numerics.definition.model import Matrix, Model
from ppo_repro.numerics.definition.rounding import rounded
from ppo_repro.numerics.definition.rows import activate


@dataclass(frozen=True)
class Mlp:
    """Intermediate results of an MLP: x [rows, H], `up` [rows, I or 2 I], and `act` [rows, I] after the activation."""

    x: Array
    up: Array
    act: Array


def mlp(model: Model, up: Matrix, down: Matrix, x: Array) -> tuple[Array, Mlp]:
    """Compute down(act(up x)), or down(act(gate x) (up x)) if gated. Kernel: `mlp_forward`.

    Args:
        model: activation, gate, deliberate roundings.
        up: [I, H], or gate and up [2 I, H].
        down: [H, I].
        x: [T, H].
    """
    r = model.rounding
    x = rounded(r.inputs, x)
    raised = layer_linear(model, x, up)
    gate, factor = np.split(raised, 2, -1) if model.gated else (raised, None)
    act = activate(model.activation, gate)[0]
    if factor is not None:
        act = act * factor
    act = rounded(r.inputs, rounded(r.activations, act))
    return layer_linear(model, act, down), Mlp(x, raised, act)


def mlp_backward(
    grads: Contributions,
    names: tuple[str, str],
    model: Model,
    up: Matrix,
    down: Matrix,
    dy: Array,
    of: Mlp,
    position: Array,
) -> Array:
    """Return the gradient of x. With d the gradient of act(gate) up: d up = d act(gate), d gate = (d up) act'(gate).

    Without gate: d act'(up). Kernel: `activation_backward_row`.

    Args:
        grads: receives the addends of weights and biases.
        names: names of up and down, prefixes in `grads`.
        model: activation, gate.
        up: [I, H], or gate and up [2 I, H].
        down: [H, I].
        dy: [T, H].
        of: the result of `mlp`.
        position: [T], position of each row.
    """
    d = linear_backward(grads, names[1], down, dy, of.act, position)
    if model.gated:
        gate, factor = np.split(of.up, 2, -1)
        value, slope = activate(model.activation, gate)
        d = np.concatenate([(d * factor) * slope, d * value], -1)
    else:
        d = d * activate(model.activation, of.up)[1]
    return linear_backward(grads, names[0], up, d, of.x, position)
