"""Compute linear layers: the product of rule 1 and a bias, and their gradients by rules 1 and 2."""

from __future__ import annotations

from ppo_repro.numerics.definition.elementary import Array
from ppo_repro.numerics.definition.gradients import Contributions, column_addends, weight_addends
from ppo_repro.numerics.definition.model import Matrix, Model
from ppo_repro.numerics.definition.product import product
from ppo_repro.numerics.definition.rounding import rounded


def linear(x: Array, matrix: Matrix) -> Array:
    """Compute x w^T, then + bias; x [T, K] -> [T, N]. Kernel: `linear`."""
    y = product(x, matrix.w, matrix.precision)
    return y if matrix.bias is None else y + matrix.bias


def linear_backward(grads: Contributions, name: str, matrix: Matrix, dy: Array, x: Array, position: Array) -> Array:
    """Return dx[t, k] = sum_n dy[t, n] w[n, k], rule 1 over n, and put the gradients of w and bias into `grads`.

    Kernel: `linear_backward`.

    Args:
        grads: receives the addends.
        name: name of the matrix, a prefix in `grads`.
        matrix: w [N, K], bias [N], precision.
        dy: [T, N].
        x: [T, K].
        position: [T], position of each row.
    """
    grads[f"{name}.w"] = weight_addends(dy, x, position, matrix.precision)
    if matrix.bias is not None:
        grads[f"{name}.bias"] = column_addends(dy, None, position)
    return product(dy, matrix.w.T, matrix.precision, "w")


def layer_linear(model: Model, x: Array, matrix: Matrix) -> Array:
    """Compute `linear`, rounded to the model's format of activations. Kernel: `linear_step`."""
    return rounded(model.rounding.activations, linear(x, matrix))
