"""What PPO needs from logits: log-probs of tokens, entropies, distances to a reference.

The distribution is the one that was sampled from: softmax(logits / temperature) over the eligible tokens. Without
top-k and top-p every token is eligible. Sums over the vocabulary are exact in exact numerics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.numerics.arithmetic.distribution import (
    Distribution,
    distribution,
    expectation,
    require_finite,
    sum_of_squares,
)
from ppo_repro.numerics.kernels import token_statistics as statistics
from ppo_repro.numerics.products import array

CPU = torch.device("cpu")


class _TokenStatistics(Function):
    @staticmethod
    def forward(ctx: Any, scaled: Tensor, targets: Tensor, eligible: Tensor | None) -> tuple[Tensor, Tensor]:
        d = distribution(scaled, eligible)
        entropy = d.log_total - expectation(d, d.shifted)
        at_target = d.shifted.gather(-1, targets[:, None])
        logprob = at_target.to(torch.float64) - d.log_total
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
        return d.scatter_add(-1, targets[:, None], gl).to(torch.float32), None, None


class _FusedTokenStatistics(Function):
    """`_TokenStatistics` by kernels; saves only the logits and four numbers for each row for the backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, eligible: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, ctx.rows = statistics.forward(array(logits), targets.numpy(), temperature, _mask(logits, eligible))
        ctx.save_for_backward(logits, targets, eligible)
        ctx.temperature = temperature
        return torch.from_numpy(out[0]), torch.from_numpy(out[1])

    @staticmethod
    def backward(ctx: Any, d_logprob: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, eligible = ctx.saved_tensors
        seeds = torch.stack([d_logprob, d_entropy]).numpy()
        gradient = statistics.backward(
            array(logits), targets.numpy(), ctx.temperature, _mask(logits, eligible), ctx.rows, seeds
        )
        return torch.from_numpy(gradient), None, None, None


def _mask(logits: Tensor, eligible: Tensor | None) -> statistics.Array:
    if eligible is None:
        return np.empty((len(logits), 0), np.bool_)
    return eligible.contiguous().numpy()


def token_statistics(
    logits: Tensor, targets: Tensor, temperature: float, eligible: Tensor | None, mode: str
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy -sum p log p, float32 [n] each, nats; differentiable in the logits.

    logits float32 [n, V], targets int64 [n] on any device, eligible bool [n, V] or None. Raises NumericsError if
    logits are not finite.
    """
    targets = targets.to(logits.device)
    if mode == "exact":
        if backend.has_kernels(logits):
            return _FusedTokenStatistics.apply(logits, targets, temperature, eligible)
        return _TokenStatistics.apply(elementwise.divided(logits, temperature), targets, eligible)
    require_finite(logits)
    scaled = elementwise.divided(logits, temperature)
    if eligible is not None:
        scaled = scaled.masked_fill(~eligible, float("-inf"))
    log_p = scaled.log_softmax(-1)
    # minus infinity times a gradient of zero would be NaN
    finite = log_p if eligible is None else log_p.masked_fill(~eligible, 0.0)
    entropy = -(log_p.exp() * finite).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def prob_sq_sum(logits: Tensor, temperature: float, eligible: Tensor | None) -> Tensor:
    """sum_v p_v^2, float32 [n], by an exact sum."""
    d = distribution(elementwise.divided(logits, temperature), eligible)
    return sum_of_squares(d)[:, 0].to(torch.float32)


def kl_divergence(p_logits: Tensor, q_logits: Tensor, temperature: float, eligible: Tensor | None) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v), float32 [n], nats, over the eligible tokens, by an exact sum."""
    p_scaled, q_scaled = (elementwise.divided(logits, temperature) for logits in (p_logits, q_logits))
    p, q = distribution(p_scaled, eligible), distribution(q_scaled, eligible)
    return expectation(p, _log_ratios(p, q))[:, 0].to(torch.float32)


def _log_ratios(p: Distribution, q: Distribution) -> Tensor:
    """log p_v - log q_v, float64 [n, V]; 0 where p has no mass."""
    log_p = p.shifted.to(torch.float64) - p.log_total
    log_q = q.shifted.to(torch.float64) - q.log_total
    return torch.where(p.masses > 0, log_p - log_q, 0.0)


class _Divergence(Function):
    """`kl_divergence` with its derivative in the first distribution: p_v (log p_v - log q_v - KL)."""

    @staticmethod
    def forward(ctx: Any, scaled: Tensor, q_scaled: Tensor, eligible: Tensor | None) -> Tensor:
        p, q = distribution(scaled, eligible), distribution(q_scaled, eligible)
        log_ratios = _log_ratios(p, q)
        divergence = expectation(p, log_ratios)
        ctx.save_for_backward(p.masses / p.total, log_ratios, divergence)
        return divergence[:, 0].to(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, log_ratios, divergence = ctx.saved_tensors
        d = p * (log_ratios - divergence) * grad.to(torch.float64)[:, None]
        return d.to(torch.float32), None, None


def kl_loss(logits: Tensor, ref_logits: Tensor, temperature: float, eligible: Tensor | None, mode: str) -> Tensor:
    """KL(p || reference) over the eligible tokens, float32 [n], nats; differentiable in `logits`.

    Shapes as in `token_statistics`.
    """
    scaled, ref_scaled = (elementwise.divided(x, temperature) for x in (logits, ref_logits))
    if mode == "exact":
        return _Divergence.apply(scaled, ref_scaled, eligible)
    if eligible is not None:
        scaled, ref_scaled = (x.masked_fill(~eligible, float("-inf")) for x in (scaled, ref_scaled))
    log_p, log_q = scaled.log_softmax(-1), ref_scaled.log_softmax(-1)
    difference = log_p - log_q
    if eligible is not None:  # both are minus infinity for the other tokens
        difference = log_p.masked_fill(~eligible, 0.0) - log_q.masked_fill(~eligible, 0.0)
    return (log_p.exp() * difference).sum(-1)


@dataclass(frozen=True)
class Scores:
    """Scores of n tokens under a policy, from which they were sampled, and a reference; float32 [n] each."""

    logprobs: Tensor
    entropies: Tensor
    prob_sq_sums: Tensor
    ref_logprobs: Tensor
    ref_kl: Tensor  # KL(policy || reference)


def score(
    logits: Tensor,
    ref_logits: Tensor,
    targets: Tensor,
    temperature: float,
    eligible: Tensor | None,
    mode: str,
) -> Scores:
    """The scores of each token that are recorded before the update. Shapes and errors as in `token_statistics`.

    The divergence and the sum of squares are exact in both modes.
    """
    if mode == "exact" and backend.has_kernels(logits):
        mask = _mask(logits, eligible)
        scores = statistics.compare(array(logits), array(ref_logits), targets.numpy(), temperature, mask)
        return Scores(*torch.from_numpy(scores))
    logprobs, entropies = token_statistics(logits, targets, temperature, eligible, mode)
    ref_logprobs, _ = token_statistics(ref_logits, targets, temperature, eligible, mode)
    ref_kl = kl_divergence(logits, ref_logits, temperature, eligible)
    return Scores(logprobs, entropies, prob_sq_sum(logits, temperature, eligible), ref_logprobs, ref_kl)


def top_logits(logits: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor]:
    """(ids int32, logits / temperature float32) of the `count` largest, [n, K] each, by falling logit, then rising id.

    logits float32 [n, V]; K = min(count, V). 0.0 comes before -0.0.
    """
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.int32), torch.empty(len(logits), 0)
    scaled = elementwise.divided(logits, temperature)
    # integers in the order of the floats; with the id below them no two are equal, so that topk has one answer
    bits = scaled.view(torch.int32).to(torch.int64)
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    columns = torch.arange(scaled.shape[-1], device=scaled.device)
    places = ((order << 32) | (0xFFFFFFFF - columns)).topk(min(count, scaled.shape[-1])).indices
    return columns[places].to(torch.int32), scaled.gather(-1, places)


def expand_kept(kept_tokens: Tensor, vocab_size: int, device: torch.device = CPU) -> Tensor | None:
    """Bit sets [n, ceil(V/8)] uint8 -> bool [n, V] on a device; None for bit sets of width 0: all are eligible."""
    if kept_tokens.shape[1] == 0:
        return None
    return torch.from_numpy(np.unpackbits(kept_tokens.numpy(), axis=1, count=vocab_size).view(np.bool_)).to(device)


def pack_bits(eligible: Tensor) -> Tensor:
    """bool [n, V] -> bit sets uint8 [n, ceil(V/8)] on the CPU, the first token in the highest bit."""
    return torch.from_numpy(np.packbits(eligible.cpu().numpy(), axis=1))
