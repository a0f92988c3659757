"""From logits to what PPO needs of them: the token's log-prob, the entropy, distances to a reference.

The distribution is softmax(logits / temperature) restricted to the eligible tokens and renormalised: the
one that was sampled from. Without top-k/top-p every token is eligible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import elementwise
from ppo_repro.numerics.grid import MANTISSA_BITS, ceil_log2, operand_bits, quantise

MASS_UNIT = 2.0**30  # probabilities relative to the largest are integers in units of 2^-30
HALF_BITS = 15


@dataclass(frozen=True)
class Distribution:
    """Integer masses of `n` positions. [n, V] unless said otherwise."""

    masses: Tensor  # float64 integers, 0 where not eligible
    total: Tensor  # [n, 1] float64, exact sum of masses
    log_total: Tensor  # [n, 1] float64, ln(total 2^-30)
    shifted: Tensor  # float32, logits / temperature minus the maximum over the eligible


def require_finite(logits: Tensor) -> None:
    """Raise NumericsError if any logit is infinite or NaN."""
    if not torch.isfinite(logits).all():
        raise NumericsError("the model's logits are not finite; lower the learning rate or check the weights")


def distribution(scaled: Tensor, eligible: Tensor | None) -> Distribution:
    """Exact masses of softmax(scaled) [n, V] float32; `eligible` bool [n, V], None for all."""
    if eligible is None:
        shifted = scaled - scaled.amax(-1, keepdim=True)
        masses = (elementwise.exp(shifted).to(torch.float64) * MASS_UNIT).round_()
    else:
        # the maximum is taken among the eligible: under new weights it may be far below the others
        shifted = scaled - scaled.masked_fill(~eligible, float("-inf")).amax(-1, keepdim=True)
        masses = (elementwise.exp(shifted).to(torch.float64) * MASS_UNIT).round_().masked_fill_(~eligible, 0.0)
    total = masses.sum(-1, keepdim=True)
    return Distribution(masses, total, elementwise.log(total * (1.0 / MASS_UNIT)), shifted)


def expectation(d: Distribution, values: Tensor) -> Tensor:
    """sum_v p_v values_v by two exact sums of products; float64 [n, 1]. values [n, V].

    The masses go in whole, as two halves of 15 bits: on a grid of their own the many small ones of a large
    vocabulary would be rounded away, and with them much of an entropy.
    """
    high = (d.masses * 2.0**-HALF_BITS).floor_()
    low = d.masses - high * 2.0**HALF_BITS
    b, b_scale = quantise(values, MANTISSA_BITS - HALF_BITS - ceil_log2(values.shape[-1]))
    total = (high * b).sum(-1, keepdim=True) * 2.0**HALF_BITS + (low * b).sum(-1, keepdim=True)
    return total * b_scale / d.total


class _TokenStatistics(Function):
    @staticmethod
    def forward(ctx: Any, scaled: Tensor, targets: Tensor, eligible: Tensor | None) -> tuple[Tensor, Tensor]:
        d = distribution(scaled, eligible)
        entropy = d.log_total - expectation(d, d.shifted)
        logprob = d.shifted.gather(-1, targets[:, None]).to(torch.float64) - d.log_total
        ctx.save_for_backward(d.masses, d.total, d.shifted, d.log_total, entropy, targets)
        return logprob[:, 0].to(torch.float32), entropy[:, 0].to(torch.float32)

    @staticmethod
    def backward(ctx: Any, d_logprob: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        masses, total, shifted, log_total, entropy, targets = ctx.saved_tensors
        p = masses / total
        gl, gh = d_logprob.to(torch.float64)[:, None], d_entropy.to(torch.float64)[:, None]
        # d logprob / d logit_v = [v = target] - p_v ;  d entropy / d logit_v = -p_v (log p_v + entropy)
        d = ((shifted.to(torch.float64) - log_total).add_(entropy)).mul_(p).mul_(gh)
        d = d.add_(gl * p).neg_()
        at_target = d.gather(-1, targets[:, None]) + gl
        return d.scatter(-1, targets[:, None], at_target).to(torch.float32), None, None


def token_statistics(
    logits: Tensor, targets: Tensor, temperature: float, eligible: Tensor | None, mode: str
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy -sum p log p, float32 [n] each, nats; differentiable in the logits.

    logits float32 [n, V], targets int64 [n], eligible bool [n, V] or None. Raises NumericsError on
    logits that are not finite.
    """
    require_finite(logits)
    scaled = logits / temperature
    if mode == "exact":
        return _TokenStatistics.apply(scaled, targets, eligible)
    if eligible is not None:
        scaled = scaled.masked_fill(~eligible, float("-inf"))
    log_p = scaled.log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def prob_sq_sum(logits: Tensor, temperature: float, eligible: Tensor | None) -> Tensor:
    """sum_v p_v^2, float32 [n], by an exact sum."""
    d = distribution(logits / temperature, eligible)
    a, scale = quantise(d.masses, operand_bits(logits.shape[-1]))
    return ((a * a).sum(-1) * (scale * scale)[:, 0] / (d.total * d.total)[:, 0]).to(torch.float32)


def kl_divergence(p_logits: Tensor, q_logits: Tensor, temperature: float, eligible: Tensor | None) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v), float32 [n], nats, over the eligible tokens, by an exact sum."""
    p, q = distribution(p_logits / temperature, eligible), distribution(q_logits / temperature, eligible)
    log_p = p.shifted.to(torch.float64) - p.log_total
    log_q = q.shifted.to(torch.float64) - q.log_total
    difference = torch.where(p.masses > 0, log_p - log_q, 0.0)
    return expectation(p, difference)[:, 0].to(torch.float32)
