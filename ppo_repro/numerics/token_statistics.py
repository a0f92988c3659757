"""Compute from rows of logits: log-probs, entropies, sums of squared and cumulative probabilities.

The distribution is the sampler's: softmax(logits / temperature) over the eligible tokens. Without top-k and top-p every
token is eligible. Mode `deterministic` uses the C kernels, mode `native` stock torch. Logits may lie on a GPU; results
per token are returned on the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ppo_repro.base.mode import Mode, is_deterministic_mode
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.interface import Struct, ffi, pointer
from ppo_repro.numerics.logit_rows import (
    call,
    dense,
    mask_on,
    native_log_softmax,
    require_finite,
    row_pointer,
    softmax,
    softmax_rows,
)


def _statistics_struct(
    logits: Tensor, targets: Tensor, temperature: float, eligible: Tensor | None, rows: Tensor
) -> Struct:
    """Make a C struct `Statistics` without memory for its results."""
    (z, ld), (n, v), device = row_pointer(logits), logits.shape, logits.device
    a = ffi.new("Statistics *", dict(logits=z, ld=ld, n=n, v=v, temperature=temperature))
    a.eligible, a.targets, a.rows = pointer(eligible, device), pointer(targets, device), softmax(rows)
    return a


class _Statistics(NamedTuple):
    """Statistics of n rows of logits, and what their derivative needs."""

    targets: Tensor  # where the logits are
    logprobs: Tensor  # log p(target), float32 [n]; here and below: on the CPU
    entropies: Tensor  # float32 [n]
    squares: Tensor  # sum of p^2, float32 [n]
    rows: Tensor  # `softmax_rows`, where the logits are


def _statistics(
    logits: Tensor, targets: Tensor, temperature: float, eligible: Tensor | None, cumulative: Tensor | None = None
) -> _Statistics:
    """Compute `token_statistics` of n rows, with the softmax rows. `cumulative` receives cumulative probabilities.

    Raises IndexError if a target is no column.
    """
    n, v = logits.shape
    if n and not 0 <= int(targets.min()) <= int(targets.max()) < v:
        raise IndexError(f"a target is outside the {v} columns of the logits")
    device = logits.device
    targets, rows, results = targets.to(device), softmax_rows(n, device), torch.empty(3, n, device=device)
    a = _statistics_struct(logits, targets, temperature, eligible, rows)
    a.logprobs, a.entropies, a.squares = (pointer(result, device) for result in results)
    a.cumulative = pointer(cumulative, device)
    call("token_statistics", a, device)
    logprobs, entropies, squares = results.cpu()
    return _Statistics(targets=targets, logprobs=logprobs, entropies=entropies, squares=squares, rows=rows)


class _TokenStatistics(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, eligible: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        statistics = _statistics(logits, targets, temperature, eligible)
        ctx.save_for_backward(logits, statistics.targets, eligible, statistics.rows)
        ctx.temperature = temperature
        return statistics.logprobs, statistics.entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, d_entropies: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, eligible, rows = ctx.saved_tensors
        device = logits.device
        d_logprobs, d_entropies = (d.to(device).contiguous() for d in (d_logprobs, d_entropies))
        gradient = torch.empty(logits.shape, device=device)
        a = _statistics_struct(logits, targets, ctx.temperature, eligible, rows)
        a.d_logprobs, a.d_entropies = pointer(d_logprobs, device), pointer(d_entropies, device)
        a.gradient = pointer(gradient, device)
        kernels_of(device).token_statistics_gradient(a)
        return gradient, None, None, None


def token_statistics(
    logits: Tensor, targets: Tensor, temperature: float, eligible: Tensor | None, mode: Mode
) -> tuple[Tensor, Tensor]:
    """Compute log p(target) and the entropy -sum p log p, both differentiable in the logits.

    Args:
        logits: float32 [n, V].
        targets: int64 [n].
        temperature: p is softmax(logits / temperature) over the eligible tokens.
        eligible: bool [n, V]; None: all tokens.

    Returns:
        Log-probs and entropies, float32 [n] each, in nats.

    Raises:
        NumericsError: logits are not finite.
    """
    if is_deterministic_mode(mode):
        return _TokenStatistics.apply(
            dense(logits), targets.contiguous(), temperature, mask_on(eligible, logits.device)
        )
    require_finite(logits)
    log_p = native_log_softmax(logits, temperature, eligible)
    # else minus infinity times a gradient of zero would give NaN
    finite = log_p if eligible is None else log_p.masked_fill(~eligible, 0.0)
    entropy = -(log_p.exp() * finite).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


class ScoringStatistics(NamedTuple):
    """Statistics of n sampled tokens in their distributions, float32 [n] each, on the CPU; without gradients."""

    logprobs: Tensor
    entropies: Tensor
    prob_sq_sums: Tensor  # sum of p^2
    cumulative_probs: Tensor  # of the tokens at least as likely, itself included; NaN if it is not eligible


def scoring_statistics(
    logits: Tensor, targets: Tensor, temperature: float, eligible: Tensor | None, mode: Mode
) -> ScoringStatistics:
    """Compute `token_statistics` and, by the kernels in both modes, sums of p^2 and cumulative probabilities.

    Tokens of equal logits / temperature are ordered by id, as top-p orders them.
    """
    logits = logits.detach()
    cumulative = torch.empty(len(logits), device=logits.device)
    mask = mask_on(eligible, logits.device)
    statistics = _statistics(dense(logits), targets.contiguous(), temperature, mask, cumulative)
    logprobs, entropies = statistics.logprobs, statistics.entropies
    if not is_deterministic_mode(mode):
        logprobs, entropies = token_statistics(logits, targets, temperature, eligible, mode)
    return ScoringStatistics(logprobs, entropies, statistics.squares, cumulative.cpu())
