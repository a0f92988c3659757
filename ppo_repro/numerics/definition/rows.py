"""Compute rule 5 on rows: norms, rotary positions, activations. Sums follow rule 3, gradients of weights rule 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, D, F, erf32, exp32, fma, sigmoid32, tanh32
from ppo_repro.numerics.definition.gradients import Contributions, column_addends
from ppo_repro.numerics.definition.model import Model, NormWeights, Rotary
from ppo_repro.numerics.definition.rounding import rounded
from ppo_repro.numerics.definition.row_sums import row_mean, row_sum


@dataclass(frozen=True)
class Normed:
    """Result y [.., C] of a norm and, for its backward pass, x_hat [.., C] (y without weights) and r [.., 1]."""

    y: Array
    x_hat: Array
    r: Array


def norm_factor(kind: str, weights: NormWeights) -> Array:
    """Return the factor of x_hat: w, or float32(1 + w)."""
    return weights.w + F(1) if kind == "rms_offset" else weights.w


def norm(kind: str, x: Array, weights: NormWeights, eps: float) -> Normed:
    """Normalise rows: r = float32(1 / sqrt(mean x^2 + eps)), x_hat = x r, y = x_hat w. Mean and root are in float64.

    A LayerNorm computes with x - float32(mean x) instead of x, and y = fma(x_hat, w, b). Kernel: `norm`.

    Args:
        kind: `layer`, `rms` or `rms_offset`.
        x: [..., H].
        weights: w [H], and b [H] of a LayerNorm.
        eps: added to the mean square; first rounded to float32.
    """
    if kind == "layer":
        x = x - row_mean(x)
    r = (1.0 / np.sqrt(row_sum(x, x) / x.shape[-1] + D(F(eps)))).astype(F)[..., None]
    x_hat = x * r
    if kind == "layer":
        assert weights.b is not None
        return Normed(fma(x_hat, weights.w, weights.b), x_hat, r)
    return Normed(x_hat * norm_factor(kind, weights), x_hat, r)


def norm_backward(
    grads: Contributions, name: str, kind: str, weights: NormWeights, dy: Array, of: Normed, position: Array
) -> Array:
    """Return dx = r fma(-x_hat, mean(g x_hat), g) with g = dy w; for a LayerNorm r (fma(..) - mean(g)).

    Kernel: `norm_backward`.

    Args:
        grads: receives the addends of the weights.
        name: name of the norm, a prefix in `grads`.
        kind: `layer`, `rms` or `rms_offset`.
        weights: w [H], and b [H] of a LayerNorm.
        dy: [T, H].
        of: the result of `norm`.
        position: [T], position of each row.
    """
    grads[f"{name}.w"] = column_addends(dy, of.x_hat, position)
    if weights.b is not None:
        grads[f"{name}.b"] = column_addends(dy, None, position)
    g = dy * norm_factor(kind, weights)
    centred = fma(-of.x_hat, row_mean(g, of.x_hat), g)
    return of.r * (centred - row_mean(g) if kind == "layer" else centred)


def layer_norm(model: Model, x: Array, weights: NormWeights) -> Normed:
    """Apply the model's norm to rows of the residual stream; y is rounded to the format of activations."""
    of = norm(model.norm, x, weights, model.eps)
    return replace(of, y=rounded(model.rounding.activations, of.y))


def rotate(x: Array, rotary: Rotary, way: int = 1) -> Array:
    """Rotate (a, b) -> (a c - b s, b c + a s), the two halves of the first R columns of heads x [T, heads, D].

    Each product and each sum is rounded. Columns from R on stay. `way` is 1, or -1 in the backward pass, where -s
    replaces s. Kernel: `rotate`.
    """
    half = rotary.cosine.shape[1]
    c, s = rotary.cosine[: len(x), None], F(way) * rotary.sine[: len(x), None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], -1)


def soft_cap(x: Array, cap: float) -> Array:
    """Compute cap tanh(x / cap); x itself if cap is 0. Kernel: `soft_cap`."""
    return F(cap) * tanh32(x / F(cap)) if cap else x


def soft_cap_slope(y: Array, cap: float) -> Array:
    """Compute the derivative of `soft_cap` from its result y: fma(-t, t, 1) with t = y / cap; 1 if cap is 0.

    Kernel: `soft_cap_slope`.
    """
    t = y / F(cap) if cap else F(0) * y
    return fma(-t, t, F(1))


def silu(x: Array) -> tuple[Array, Array]:
    """Compute x sigma(x), and its derivative sigma fma(x, 1 - sigma, 1). Kernels: `silu`, `silu_slope`."""
    sigma = sigmoid32(x)
    return x * sigma, sigma * fma(x, F(1) - sigma, F(1))


def gelu(x: Array) -> tuple[Array, Array]:
    """Compute (x / 2) (1 + erf(x / sqrt(2))), and its derivative. Kernels: `gelu`, `gelu_slope`."""
    cdf = F(1) + erf32(x * F(0.707106781))
    return (F(0.5) * x) * cdf, fma(x * F(0.398942280), exp32((F(-0.5) * x) * x), F(0.5) * cdf)


def gelu_tanh(x: Array) -> tuple[Array, Array]:
    """Compute (x / 2) (1 + t) with t = tanh(sqrt(2 / pi) (x + 0.044715 x^3)), and its derivative.

    Kernels: `gelu_tanh`, `gelu_tanh_slope`.
    """
    half, root, cubic = F(0.5) * x, F(0.797884561), F(0.044715)
    t = tanh32(root * fma((cubic * x) * x, x, x))
    slope = root * fma((F(3) * cubic) * x, x, F(1))
    return half * (F(1) + t), fma(half * (F(1) - t * t), slope, F(0.5) * (F(1) + t))


# by the names of the header's enum ActivationKind
ACTIVATIONS: dict[str, Callable[[Array], tuple[Array, Array]]] = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}


def activate(kind: str, x: Array) -> tuple[Array, Array]:
    """Compute an activation and its derivative. Kernels: `activation`, `activation_slope`."""
    return ACTIVATIONS[kind](x)
