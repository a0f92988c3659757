"""Compute from rows of logits: log-probs, entropies, divergences, kept tokens and sampled tokens.

The distribution is the sampler's: softmax(logits / temperature) over the eligible tokens. Without top-k and top-p every
token is eligible. Mode `deterministic` uses the C kernels, mode `native` stock torch. Logits may lie on a GPU; results
per token are returned on the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ppo_repro.base.errors import NumericsError
from ppo_repro.base.mode import Mode, is_deterministic_mode
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.interface import CPU, Struct, ffi, pointer

NOT_FINITE = (
    "the model's logits are not finite, or further apart than float32 reaches; "
    "lower the learning rate or check the weights"
)


def require_finite(logits: Tensor) -> None:
    """Raise NumericsError if any logit is infinite or NaN."""
    if not torch.isfinite(logits).all():
        raise NumericsError(NOT_FINITE)


def _call(function: str, arguments: Struct, device: torch.device) -> None:
    """Call a kernel. Raises NumericsError if a row of logits is not finite."""
    if not getattr(kernels_of(device), function)(arguments):
        raise NumericsError(NOT_FINITE)


def _softmax_rows(n: int, device: torch.device) -> Tensor:
    """Allocate memory for n C structs `Softmax`."""
    return torch.empty(n, ffi.sizeof("Softmax"), dtype=torch.uint8, device=device)


def _softmax(rows: Tensor) -> Any:
    """Return a pointer to the structs in `_softmax_rows`."""
    return ffi.cast("Softmax *", rows.data_ptr())


def _dense(logits: Tensor) -> Tensor:
    """Return logits [n, V] whose rows are contiguous; the rows may lie apart."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _row_pointer(logits: Tensor) -> tuple[Any, int]:
    """Return a pointer to `_dense` logits, and the floats from one row to the next."""
    if logits.dtype != torch.float32:
        raise ValueError(f"expected float32 logits, got {logits.dtype}")
    return ffi.cast("float *", logits.data_ptr()), logits.stride(0)


def _mask(eligible: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the mask [n, V] on the kernels' device, None for None."""
    return None if eligible is None else eligible.to(device).contiguous()


def _statistics_struct(
    logits: Tensor, targets: Tensor, temperature: float, eligible: Tensor | None, rows: Tensor
) -> Struct:
    """Make a C struct `Statistics` without memory for its results."""
    (z, ld), (n, v), device = _row_pointer(logits), logits.shape, logits.device
    a = ffi.new("Statistics *", dict(logits=z, ld=ld, n=n, v=v, temperature=temperature))
    a.eligible, a.targets, a.rows = pointer(eligible, device), pointer(targets, device), _softmax(rows)
    return a


class _Statistics(NamedTuple):
    """Statistics of n rows of logits, and what their derivative needs."""

    targets: Tensor  # where the logits are
    logprobs: Tensor  # log p(target), float32 [n]; here and below: on the CPU
    entropies: Tensor  # float32 [n]
    squares: Tensor  # sum of p^2, float32 [n]
    rows: Tensor  # `_softmax_rows`, where the logits are


def _statistics(
    logits: Tensor, targets: Tensor, temperature: float, eligible: Tensor | None, cumulative: Tensor | None = None
) -> _Statistics:
    """Compute `token_statistics` of n rows, with the softmax rows; `cumulative` receives cumulative probabilities.

    Raises IndexError if a target is no column.
    """
    n, v = logits.shape
    if n and not 0 <= int(targets.min()) <= int(targets.max()) < v:
        raise IndexError(f"a target is outside the {v} columns of the logits")
    device = logits.device
    targets, rows, results = targets.to(device), _softmax_rows(n, device), torch.empty(3, n, device=device)
    a = _statistics_struct(logits, targets, temperature, eligible, rows)
    a.logprobs, a.entropies, a.squares = (pointer(result, device) for result in results)
    a.cumulative = pointer(cumulative, device)
    _call("token_statistics", a, device)
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
        mode: `deterministic` or `native`.

    Returns:
        Log-probs and entropies, float32 [n] each, in nats.

    Raises:
        NumericsError: logits are not finite.
    """
    if is_deterministic_mode(mode):
        return _TokenStatistics.apply(_dense(logits), targets.contiguous(), temperature, _mask(eligible, logits.device))
    require_finite(logits)
    log_p = _native_log_softmax(logits, temperature, eligible)
    # minus infinity times a gradient of zero would be NaN
    finite = log_p if eligible is None else log_p.masked_fill(~eligible, 0.0)
    entropy = -(log_p.exp() * finite).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def _native_log_softmax(logits: Tensor, temperature: float, eligible: Tensor | None) -> Tensor:
    """Return log p [n, V] by stock torch; minus infinity for tokens that are not eligible."""
    scaled = logits / temperature
    if eligible is not None:
        scaled = scaled.masked_fill(~eligible, float("-inf"))
    return scaled.log_softmax(-1)


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

    Tokens of equal logits are ordered by id, as top-p orders them.
    """
    logits = logits.detach()
    cumulative = torch.empty(len(logits), device=logits.device)
    found = _statistics(_dense(logits), targets.contiguous(), temperature, _mask(eligible, logits.device), cumulative)
    logprobs, entropies = found.logprobs, found.entropies
    if not is_deterministic_mode(mode):
        logprobs, entropies = token_statistics(logits, targets, temperature, eligible, mode)
    return ScoringStatistics(logprobs, entropies, found.squares, cumulative.cpu())


def _divergence_struct(
    p_logits: Tensor, q_logits: Tensor, temperature: float, eligible: Tensor | None, p: Tensor, q: Tensor
) -> Struct:
    """Make a C struct `Divergence` without memory for its results; p and q are `_softmax_rows`."""
    (zp, p_ld), (zq, q_ld), (n, v) = _row_pointer(p_logits), _row_pointer(q_logits), p_logits.shape
    rows = dict(p_logits=zp, p_ld=p_ld, q_logits=zq, q_ld=q_ld, n=n, v=v, temperature=temperature)
    a = ffi.new("Divergence *", rows)
    a.eligible, a.p, a.q = pointer(eligible, p_logits.device), _softmax(p), _softmax(q)
    return a


class _Divergence(Function):
    """Function KL(p || q) with its derivative in the logits of p: p_v (log p_v - log q_v - KL) / temperature."""

    @staticmethod
    def forward(ctx: Any, p_logits: Tensor, q_logits: Tensor, temperature: float, eligible: Tensor | None) -> Tensor:
        n, device = len(p_logits), p_logits.device
        p, q, out = _softmax_rows(n, device), _softmax_rows(n, device), torch.empty(n, device=device)
        a = _divergence_struct(p_logits, q_logits, temperature, eligible, p, q)
        a.out = pointer(out, device)
        _call("kl_divergence", a, device)
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
        mask = _mask(eligible, p_logits.device)
        return _Divergence.apply(_dense(p_logits), _dense(q_logits.detach()), temperature, mask)
    log_p, log_q = (_native_log_softmax(logits, temperature, eligible) for logits in (p_logits, q_logits))
    difference = log_p - log_q
    if eligible is not None:  # both are minus infinity for the other tokens
        difference = log_p.masked_fill(~eligible, 0.0) - log_q.masked_fill(~eligible, 0.0)
    return (log_p.exp() * difference).sum(-1)


def expand_kept(kept_tokens: Tensor, vocab_size: int) -> Tensor | None:
    """Unpack bit sets [n, ceil(V/8)] uint8 to bool [n, V]; None (all tokens are eligible) for bit sets of width 0."""
    if kept_tokens.shape[1] == 0:
        return None
    return torch.from_numpy(np.unpackbits(kept_tokens.numpy(), axis=1, count=vocab_size).view(np.bool_))


def pack_bits(eligible: Tensor) -> Tensor:
    """Pack bool [n, V] to bit sets uint8 [n, ceil(V/8)] on the CPU, the first token in the highest bit."""
    return torch.from_numpy(np.packbits(eligible.cpu().numpy(), axis=1))


def normal_noise(seeds: Tensor, positions: Tensor, columns: int, device: torch.device = CPU) -> Tensor:
    """Return standard normal noise z = sqrt(-2 ln u) cos(2 pi v). Sampling has other noise.

    u, v = (h + 1/2) / 2^32 with h = hash(1 for u and 2 for v, seed, position, column); |z| < 6.8. Box and Muller, 1958.

    Args:
        seeds: [n] int64.
        positions: [n] int64.
        columns: columns of each row.
        device: device of the kernels and of the result.

    Returns:
        [n, columns] float64.
    """
    out = torch.empty(len(seeds), columns, dtype=torch.float64, device=device)
    seeds, positions = (x.to(device).contiguous() for x in (seeds, positions))
    noise = ffi.new("Noise *", dict(n=len(seeds), columns=columns))
    noise.seeds, noise.positions, noise.out = (pointer(x, device) for x in (seeds, positions, out))
    kernels_of(device).normal_noise(noise)
    return out


class KeptTokens(NamedTuple):
    """Tokens of n rows that top-k and top-p keep."""

    eligible: Tensor  # bool [n, V], where the logits are
    rank: Tensor  # int32 [n, V], by falling logit, where the logits are
    log_mass: Tensor  # ln of the probability of the kept tokens, float32 [n], on the CPU


def cut_tokens(scaled: Tensor, top_k: int, top_p: float) -> KeptTokens:
    """Return the tokens that top-k and top-p keep; `scaled` is logits / temperature, float32 [n, V].

    Tokens are ranked by falling logit, ties by id. A token is kept while its rank is below top_k (0: no limit) and the
    mass before it is at most top_p; the likeliest is always kept. Masses are exp(scaled - largest), added one by one by
    rank in float64. Raises NumericsError if logits are not finite.
    """
    (n, v), device = scaled.shape, scaled.device
    scaled = scaled.contiguous()
    order = torch.argsort(scaled, dim=-1, descending=True, stable=True)
    eligible, rank = (torch.empty(n, v, dtype=dtype, device=device) for dtype in (torch.bool, torch.int32))
    log_kept = torch.empty(n, device=device)
    cut = ffi.new("Cut *", dict(n=n, v=v, top_k=top_k, top_p=top_p))
    cut.scaled, cut.order = pointer(scaled, device), pointer(order, device)
    cut.eligible, cut.rank, cut.log_kept = (pointer(x, device) for x in (eligible, rank, log_kept))
    _call("cut_tokens", cut, device)
    return KeptTokens(eligible=eligible, rank=rank, log_mass=log_kept.cpu())


def sample_tokens(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float, cut: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Sample tokens: the argmax of log p_v + gumbel(seed, position, column_v), the first one if two are equal.

    Args:
        logits: float32 [n, V].
        seeds, positions: int64 [n]; they determine the noise.
        temperature: p is softmax(logits / temperature) over all tokens; log p is rounded to float32.
        cut: which tokens are eligible, bool [n, V], and the column of each, int32 [n, V]; None: all tokens are
            eligible, and the column of a token is its id.

    Returns:
        Tokens int64 [n] and their log p (nats) float32 [n].

    Raises:
        NumericsError: logits are not finite.
    """
    n, device = len(logits), logits.device
    logits, seeds, positions = _dense(logits.detach()), seeds.to(device).contiguous(), positions.to(device).contiguous()
    tokens, logprobs = torch.empty(n, dtype=torch.int64, device=device), torch.empty(n, device=device)
    rows = _softmax_rows(n, device)
    z, ld = _row_pointer(logits)
    a = ffi.new("Sampling *", dict(logits=z, ld=ld, n=n, v=logits.shape[1], temperature=temperature))
    a.seeds, a.positions = pointer(seeds, device), pointer(positions, device)
    if cut is not None:
        a.eligible, a.columns = pointer(cut[0], device), pointer(cut[1], device)
    a.tokens, a.logprobs, a.rows = pointer(tokens, device), pointer(logprobs, device), _softmax(rows)
    _call("sample_tokens", a, device)
    return tokens.cpu(), logprobs.cpu()
