"""Compute log-probs, entropies, divergences and their gradients from rows of logits. Sums over tokens follow rule 3.

z float32 [n, V]; eligible bool [n, V], None: all tokens; results float32 unless a docstring says float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, D, F, exp32, fma, log64, quiet
from ppo_repro.numerics.definition.row_sums import row_sum
from ppo_repro.numerics.definition.rows import soft_cap, soft_cap_slope


@dataclass(frozen=True)
class Softmax:
    """Softmax of rows, with e = exp(shifted), or 0 for an ineligible token; [n, V], the last three float64 [n, 1]."""

    shifted: Array
    e: Array
    total: Array
    log_total: Array
    top: Array


def scale_logits(z: Array, divisor: float, cap: float) -> Array:
    """Compute what follows the head: z / divisor, then the soft cap, unless it is 0. Kernel: `scale_logits`."""
    return soft_cap(z / F(divisor), cap)


def scale_logits_gradient(y: Array, d: Array, divisor: float, cap: float) -> Array:
    """Return (d slope) / divisor. Kernel: `scale_logits_gradient`.

    Args:
        y: the result of `scale_logits`.
        d: its gradient, of the same shape.
        divisor: divides the head's logits.
        cap: the soft cap; 0: none.
    """
    return d * soft_cap_slope(y, cap) / F(divisor)


@quiet
def softmax(z: Array, temperature: float, eligible: Array | None) -> Softmax:
    """Subtract the largest eligible z / temperature, and sum the exponentials; p = e / total. Kernel: `row_softmax`."""
    scaled = z / F(temperature)
    candidates = scaled if eligible is None else np.where(eligible, scaled, F(-np.inf))
    top = candidates.max(-1, keepdims=True) + F(0)  # never -0
    shifted = scaled - top
    e = exp32(shifted) if eligible is None else np.where(eligible, exp32(shifted), F(0))
    total = row_sum(e)[:, None]
    return Softmax(shifted, e, total, log64(total), top.astype(D))


def log_p(s: Softmax) -> Array:
    """Return log p = shifted - log_total, computed in float64 and rounded once; [n, V]. Kernel: `log_prob`."""
    return (s.shifted.astype(D) - s.log_total).astype(F)


def expectation(s: Softmax, values: Array) -> Array:
    """Compute sum_v p_v values_v, float64 [n, 1]; values [n, V]."""
    return row_sum(s.e.astype(D) * values)[:, None] / s.total


def statistics(z: Array, targets: Array, temperature: float, eligible: Array | None) -> tuple[Array, Array, Array]:
    """Return (log p of the targets, entropies, sums of p^2), [n] each. Kernel: `token_statistics`.

    Args:
        z: logits [n, V].
        targets: [n], token ids.
        temperature: above 0.
        eligible: [n, V] bool, the tokens that cuts left; None: all.
    """
    s = softmax(z, temperature, eligible)
    entropy = s.log_total - expectation(s, s.shifted.astype(D))
    squares = row_sum(s.e, s.e)[:, None] / (s.total * s.total)
    at_target = np.take_along_axis(log_p(s), targets[:, None], -1)
    return at_target[:, 0], entropy[:, 0].astype(F), squares[:, 0].astype(F)


def cumulative(z: Array, targets: Array, temperature: float, eligible: Array | None) -> Array:
    """Return the probability of all tokens up to the target, itself included, in the order of `sampling.cut`.

    The order is by falling z / temperature; equal tokens are ordered by id. The result is [n] float32.

    Args:
        z: logits [n, V].
        targets: [n], eligible token ids.
        temperature: above 0.
        eligible: [n, V] bool, the tokens that cuts left; None: all.
    """
    scaled = z / F(temperature)
    own = np.take_along_axis(scaled, targets[:, None], -1)
    before = (scaled > own) | ((scaled == own) & (np.arange(z.shape[1]) <= targets[:, None]))
    among = before if eligible is None else before & eligible
    totals = (softmax(z, temperature, mask).total[:, 0] for mask in (among, eligible))
    return (next(totals) / next(totals)).astype(F)


@quiet
def statistics_gradient(
    z: Array, targets: Array, temperature: float, eligible: Array | None, d_logprob: Array, d_entropy: Array
) -> Array:
    """Return ([v = target] d_logprob - p_v (d_logprob + d_entropy (shifted_v - mean))) / temperature, [n, V].

    Rows whose d_logprob and d_entropy are zeros of any sign have +0. Kernel: `token_statistics_gradient`.

    Args:
        z: logits [n, V].
        targets: [n], token ids.
        temperature: above 0.
        eligible: [n, V] bool, the tokens that cuts left; None: all.
        d_logprob: [n], gradient of each log-prob.
        d_entropy: [n], gradient of each entropy.
    """
    s = softmax(z, temperature, eligible)
    mean = expectation(s, s.shifted.astype(D)).astype(F)
    p = s.e * (1.0 / s.total).astype(F)
    away = p * fma(np.broadcast_to(d_entropy[:, None], z.shape), s.shifted - mean, d_logprob[:, None])
    if eligible is not None:
        away = np.where(eligible, away, F(0))
    chosen = np.arange(z.shape[1]) == targets[:, None]
    gradient = (np.where(chosen, d_logprob[:, None], F(0)) - away) / F(temperature)
    return np.where(((d_logprob != 0) | (d_entropy != 0))[:, None], gradient, F(0))


def divergence(p_logits: Array, q_logits: Array, temperature: float, eligible: Array | None) -> Array:
    """Return KL(p || q) = sum_v p_v (shifted_p - shifted_q) + log_total_q - log_total_p, [n]. Kernel: `kl_divergence`.

    Args:
        p_logits: [n, V].
        q_logits: [n, V].
        temperature: above 0.
        eligible: [n, V] bool, the tokens that cuts left; None: all.
    """
    p, q = softmax(p_logits, temperature, eligible), softmax(q_logits, temperature, eligible)
    mean = expectation(p, p.shifted.astype(D) - q.shifted.astype(D))
    return (mean + (q.log_total - p.log_total))[:, 0].astype(F)


def divergence_gradient(
    p_logits: Array, q_logits: Array, temperature: float, eligible: Array | None, seed: Array
) -> Array:
    """Return seed p_v ((shifted_p - shifted_q) - mean) / temperature, [n, V]; +0 if not eligible.

    Kernel: `kl_divergence_gradient`.

    Args:
        p_logits: [n, V].
        q_logits: [n, V].
        temperature: above 0.
        eligible: [n, V] bool, the tokens that cuts left; None: all.
        seed: [n], the gradient of each divergence.
    """
    p, q = softmax(p_logits, temperature, eligible), softmax(q_logits, temperature, eligible)
    difference = p.shifted.astype(D) - q.shifted.astype(D)
    away = (difference - expectation(p, difference)).astype(F)
    gradient = seed[:, None] * ((p.e * (1.0 / p.total).astype(F)) * away) / F(temperature)
    return gradient if eligible is None else np.where(eligible, gradient, F(0))
