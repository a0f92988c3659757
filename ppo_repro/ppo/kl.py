"""Estimators of a KL divergence from log-probs of sampled tokens. Schulman, "Approximating KL Divergence", 2020.

The tokens are drawn from p, and `log_ratio` = log p - log q in any shape. Each function estimates KL(p || q) per
token in nats, or with `reverse` KL(q || p), which with rho = q/p is the mean under p of rho log rho.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics import elementwise

_SERIES_TERMS = 16


def k1(log_ratio: Tensor) -> Tensor:
    """log p - log q: unbiased for KL(p || q), any sign. Shape and dtype of the input."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: never negative, biased at third order, the same in both directions."""
    return log_ratio * log_ratio * 0.5


def k3(log_ratio: Tensor) -> Tensor:
    """rho - 1 - log rho = expm1(-x) + x for x = log p - log q: unbiased for KL(p || q), never negative. Float64.

    For |x| <= 1 it is the power series: there exp(-x) - 1 + x loses its digits in floating point.
    """
    x = log_ratio.to(torch.float64)
    series = torch.full_like(x, 1.0)
    # x^2/2 (1 - x/3 (1 - x/4 (1 - x/5 ...)))
    for n in range(_SERIES_TERMS, 2, -1):
        series = 1.0 - x * series / n
    large = elementwise.exp(-log_ratio.to(torch.float32)).to(torch.float64) - 1.0 + x
    return torch.where(x.abs() <= 1.0, x * x * 0.5 * series, large.clamp(min=0.0))


def reverse_k1(log_ratio: Tensor) -> Tensor:
    """rho log rho for log rho = -x: unbiased for KL(q || p), any sign. Float64."""
    x = log_ratio.to(torch.float64)
    return elementwise.exp(-log_ratio.to(torch.float32)).to(torch.float64) * -x


def reverse_k3(log_ratio: Tensor) -> Tensor:
    """rho log rho - rho + 1 for log rho = -x: unbiased for KL(q || p), never negative. Float64.

    Computed as rho times k3 of the inverse ratio, so that small x keep their digits.
    """
    rho = elementwise.exp(-log_ratio.to(torch.float32)).to(torch.float64)
    return rho * k3(-log_ratio)


def estimate(kind: str, log_ratio: Tensor, reverse: bool = False) -> Tensor:
    """The estimator `kind` (k1, k2 or k3) of KL(p || q), with `reverse` of KL(q || p), as float32."""
    forward = {"k1": k1, "k2": k2, "k3": k3}
    backward = {"k1": reverse_k1, "k2": k2, "k3": reverse_k3}
    return (backward if reverse else forward)[kind](log_ratio).to(torch.float32)


def loss(kind: str, new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The estimator `kind` of KL(new || reference) as a differentiable per-token loss, [n] float32, nats.

    k1: log pi - log ref, whose gradient has mean zero under pi: as a loss it constrains nothing.
    k2: half the square; its gradient, (log pi - log ref) grad log pi, is that of KL(pi || ref) on-policy.
    k3: ref/pi - 1 - log(ref/pi); its gradient is that of KL(ref || pi). Tang and Munos, 2025.
    """
    assert new_logprobs.shape == ref_logprobs.shape == (new_logprobs.numel(),)
    x = new_logprobs - ref_logprobs
    if kind == "k1":
        return x
    if kind == "k2":
        return x * x * 0.5
    return k3_loss(x)


def k3_loss(log_ratio: Tensor) -> Tensor:
    """`k3` as a differentiable float32 loss; its derivative is exactly 0 where the log-ratio is 0."""
    return _K3.apply(log_ratio)


class _K3(torch.autograd.Function):
    """`k3` with its derivative, 1 - exp(-x)."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return k3(x).to(torch.float32)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * (1.0 - elementwise.exp(-x))
