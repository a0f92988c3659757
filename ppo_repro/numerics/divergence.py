"""Compute the KL divergence between two distributions over the vocabulary, from rows of their logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ppo_repro.base.mode import Mode, is_deterministic_mode
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.interface import Struct, ffi, pointer
from ppo_repro.numerics.logit_rows import call, dense, mask_on, native_log_softmax, row_pointer, softmax, softmax_rows


def _divergence_struct(
    p_logits: Tensor, q_logits: Tensor, temperature: float, eligible: Tensor | None, p: Tensor, q: Tensor
) -> Struct:
    """Make a C struct `Divergence` without memory for its results; p and q are `softmax_rows`."""
    (zp, p_ld), (zq, q_ld), (n, v) = row_pointer(p_logits), row_pointer(q_logits), p_logits.shape
    rows = dict(p_logits=zp, p_ld=p_ld, q_logits=zq, q_ld=q_ld, n=n, v=v, temperature=temperature)
    a = ffi.new("Divergence *", rows)
    a.eligible, a.p, a.q = pointer(eligible, p_logits.device), softmax(p), softmax(q)
    return a


class _Divergence(Function):
    """Function KL(p || q) with its derivative in the logits of p: p_v (log p_v - log q_v - KL) / temperature."""

    @staticmethod
    def forward(ctx: Any, p_logits: Tensor, q_logits: Tensor, temperature: float, eligible: Tensor | None) -> Tensor:
        n, device = len(p_logits), p_logits.device
        p, q, out = softmax_rows(n, device), softmax_rows(n, device), torch.empty(n, device=device)
        a = _divergence_struct(p_logits, q_logits, temperature, eligible, p, q)
        a.out = pointer(out, device)
        call("kl_divergence", a, device)
        ctx.save_for_backward(p_logits, q_logits, eligible, p, q)
        ctx.temperature = temperature
        return out.cpu()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p_logits, q_logits, eligible, p, q = ctx.saved_tensors
        device = p_logits.device
        gradient, grad = torch.empty(p_logits.shape, device=device), grad.to(device).contiguous()
        a = _divergence_struct(p_logits, q_logits, ctx.temperature, eligible, p, q)
        a.seed, a.gradient = pointer(grad, device), pointer(gradient, device)
        kernels_of(device).kl_divergence_gradient(a)
        return gradient, None, None, None


def kl_divergence(
    p_logits: Tensor, q_logits: Tensor, temperature: float, eligible: Tensor | None, mode: Mode = "deterministic"
) -> Tensor:
    """Compute KL(p || q) = sum_v p_v (log p_v - log q_v) over the eligible tokens, differentiable in p.

    Args:
        p_logits, q_logits: float32 [n, V].
        temperature, eligible, mode: the arguments of `token_statistics`.

    Returns:
        Divergences float32 [n], in nats.

    Raises:
        NumericsError: logits are not finite.
    """
    if is_deterministic_mode(mode):
        mask = mask_on(eligible, p_logits.device)
        return _Divergence.apply(dense(p_logits), dense(q_logits.detach()), temperature, mask)
    log_p, log_q = (native_log_softmax(logits, temperature, eligible) for logits in (p_logits, q_logits))
    difference = log_p - log_q
    if eligible is not None:  # both are minus infinity for the other tokens
        difference = log_p.masked_fill(~eligible, 0.0) - log_q.masked_fill(~eligible, 0.0)
    return (log_p.exp() * difference).sum(-1)
