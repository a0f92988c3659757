"""Estimators of a KL divergence from log-probs of sampled tokens. Schulman, "Approximating KL Divergence", 2020.

The tokens are drawn from p, and `log_ratio` is x = log p - log q in any shape. Each function estimates KL(p || q) per
token in nats, or with `reverse` KL(q || p), which is the mean under p of rho log rho with rho = q/p = exp(-x). rho is
clamped to [e^-87, e^88], so that every estimator nears its limit at infinite x; NaN stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppo_repro.numerics import elementwise
from ppo_repro.numerics.elementwise import EXP_MAX, EXP_MIN

_SERIES_TERMS = 16


def k1(log_ratio: Tensor) -> Tensor:
    """Return x: unbiased for KL(p || q), of any sign, in shape and dtype of `log_ratio`."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return x^2 / 2: never negative, biased at third order, in shape and dtype of `log_ratio`.

    The estimate is the same in both directions.
    """
    return log_ratio * log_ratio * 0.5


def k3(log_ratio: Tensor) -> Tensor:
    """Return rho - 1 - log rho = exp(-x) - 1 + x: unbiased for KL(p || q), never negative. Float64.

    For |x| <= 1 the power series is used, because exp(-x) - 1 + x loses digits there in floating point.
    """
    x = log_ratio.to(torch.float64).clamp(min=-EXP_MAX)
    series = torch.full_like(x, 1.0)
    # x^2/2 (1 - x/3 (1 - x/4 (1 - x/5 ...)))
    for n in range(_SERIES_TERMS, 2, -1):
        series = 1.0 - x * series / n
    return torch.where(x.abs() <= 1.0, x * x * 0.5 * series, _rho(log_ratio) - 1.0 + x)


def reverse_k1(log_ratio: Tensor) -> Tensor:
    """Return rho log rho: unbiased for KL(q || p), any sign. Float64."""
    return _rho(log_ratio) * -log_ratio.to(torch.float64).clamp(max=-EXP_MIN)


def reverse_k3(log_ratio: Tensor) -> Tensor:
    """Return rho log rho - rho + 1: unbiased for KL(q || p), never negative, 1 for infinite x. Float64.

    For x <= 1 the result is rho times k3 of the inverse ratio, so that small x lose no digits.
    """
    x, rho = log_ratio.to(torch.float64).clamp(max=-EXP_MIN), _rho(log_ratio)
    return torch.where(x > 1.0, 1.0 - (1.0 + x) * rho, rho * k3(-x))


def _rho(log_ratio: Tensor) -> Tensor:
    return elementwise.exp(-log_ratio.to(torch.float32)).to(torch.float64)


def estimate(kind: str, log_ratio: Tensor, reverse: bool = False) -> Tensor:
    """Compute the estimator `kind` (k1, k2 or k3) of KL(p || q), or with `reverse` of KL(q || p).

    The result is float32, in nats and in the shape of `log_ratio`.
    """
    forward = {"k1": k1, "k2": k2, "k3": k3}
    backward = {"k1": reverse_k1, "k2": k2, "k3": reverse_k3}
    return (backward if reverse else forward)[kind](log_ratio).to(torch.float32)


def loss(kind: str, new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Compute the estimator `kind` of KL(new || reference) as a differentiable per-token loss, [n] float32, nats.

    k1: log pi - log ref. Its gradient has mean zero under pi, so as a loss it constrains nothing.
    k2: (log pi - log ref)^2 / 2. On-policy, its gradient (log pi - log ref) grad log pi is that of KL(pi || ref).
    k3: ref/pi - 1 - log(ref/pi). Its gradient is on-policy the gradient of KL(ref || pi). Tang and Munos, 2025.
    """
    assert new_logprobs.shape == ref_logprobs.shape == (new_logprobs.numel(),)
    x = new_logprobs - ref_logprobs
    return {"k1": k1, "k2": k2, "k3": k3_loss}[kind](x)


def k3_loss(log_ratio: Tensor) -> Tensor:
    """Return `k3` as a differentiable float32 loss. Its derivative 1 - exp(-x) is accurate to 1 ulp at every x."""
    return _K3.apply(log_ratio)


class _K3(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return k3(x).to(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * (0.0 - elementwise.expm1(-x))
