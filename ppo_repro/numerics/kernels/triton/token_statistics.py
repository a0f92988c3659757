"""Log-probs and entropies of tokens, their gradient, and sampled tokens, as `arithmetic.distribution` defines them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.distribution import MASS_UNIT, NOT_FINITE, value_bits
from ppo_repro.numerics.kernels.triton.functions import (
    PARTS,
    PARTS_MASK,
    exp,
    exponent_of_bits,
    log,
    magnitude_bits,
    pow2,
    round_limbs,
    to_int64,
)
from ppo_repro.numerics.kernels.triton.launch import WARPS4, blocks_of

UNIT: tl.constexpr = tl.constexpr(MASS_UNIT)
INVERSE_UNIT: tl.constexpr = tl.constexpr(1.0 / MASS_UNIT)
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)
MASK32: tl.constexpr = tl.constexpr(0xFFFFFFFF)
LARGEST: tl.constexpr = tl.constexpr(1.7976931348623157e308)
SMALLEST: tl.constexpr = tl.constexpr(1e-300)


@triton.jit
def shifted_at(scaled, eligible, row, k, size, top, MASKED: tl.constexpr):
    """scaled - top of some tokens, 0 beyond the vocabulary, and which of them are eligible."""
    live = k < size
    shifted = tl.where(live, tl.load(scaled + row + k, mask=live, other=0.0) - top, 0.0)
    if MASKED:
        live = live & (tl.load(eligible + row + k, mask=live, other=0) != 0)
    return shifted, live


@triton.jit
def mass_of(shifted, live):
    """The integer mass of each token, int64."""
    mass = to_int64(exp(shifted).to(tl.float64) * UNIT)
    return tl.where(live, mass, 0)


@triton.jit
def largest_logit(scaled, eligible, row, size, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The maximum over the eligible tokens of a row."""
    top = float("-inf")
    for start in range(0, size, BLOCK):
        k = start + tl.arange(0, BLOCK)
        live = k < size
        value = tl.load(scaled + row + k, mask=live, other=float("-inf"))
        if MASKED:
            live = live & (tl.load(eligible + row + k, mask=live, other=0) != 0)
        top = tl.maximum(top, tl.max(tl.where(live, value, float("-inf")), 0))
    return top


@triton.jit
def total_mass(scaled, eligible, row, size, top, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the masses of a row, int64, and the bits of its largest |shifted|."""
    total, bits = tl.zeros((BLOCK,), dtype=tl.int64), tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, size, BLOCK):
        shifted, live = shifted_at(scaled, eligible, row, start + tl.arange(0, BLOCK), size, top, MASKED)
        bits = tl.maximum(bits, magnitude_bits(shifted))
        total += mass_of(shifted, live)
    return tl.sum(total, 0), tl.max(bits, 0)


@triton.jit
def statistics(
    scaled, eligible, targets, logprobs, entropies, tops, totals, log_totals, wide_entropies, finite, size, bits,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """log p(target) and entropy of one row, and the numbers that the gradient needs."""
    index = tl.program_id(0).to(tl.int64)
    row = index * size
    top = largest_logit(scaled, eligible, row, size, MASKED, BLOCK)
    whole, largest = total_mass(scaled, eligible, row, size, top, MASKED, BLOCK)
    is_finite = largest < INFINITE
    tl.store(finite + index, is_finite.to(tl.int32))
    total = tl.where(is_finite, whole, 1).to(tl.float64)
    log_total = log(total * INVERSE_UNIT)
    e = tl.where(is_finite, exponent_of_bits(largest), 0)
    unit = pow2(bits - e)
    high, middle, low = (
        tl.zeros((BLOCK,), dtype=tl.int64),
        tl.zeros((BLOCK,), dtype=tl.int64),
        tl.zeros((BLOCK,), dtype=tl.int64),
    )
    for start in range(0, size, BLOCK):
        shifted, live = shifted_at(scaled, eligible, row, start + tl.arange(0, BLOCK), size, top, MASKED)
        mass, value = mass_of(shifted, live), to_int64(shifted.to(tl.float64) * unit)
        high += (mass >> (2 * PARTS)) * value
        middle += ((mass >> PARTS) & PARTS_MASK) * value
        low += (mass & PARTS_MASK) * value
    lowest = tl.sum(low, 0)
    between = tl.sum(middle, 0) + (lowest >> PARTS)
    below = ((between & PARTS_MASK) << PARTS) + (lowest & PARTS_MASK)
    mean = (round_limbs(tl.sum(high, 0) + (between >> PARTS), below, 2 * PARTS) * pow2(e - bits)) / total
    entropy = log_total - mean
    at_target = tl.load(scaled + row + tl.load(targets + index)) - top
    tl.store(logprobs + index, (at_target.to(tl.float64) - log_total).to(tl.float32))
    tl.store(entropies + index, entropy.to(tl.float32))
    tl.store(wide_entropies + index, entropy)
    tl.store(tops + index, top)
    tl.store(totals + index, total)
    tl.store(log_totals + index, log_total)


@triton.jit
def statistics_backward(
    scaled, eligible, targets, tops, totals, log_totals, wide_entropies, d_logprobs, d_entropies, gradient, size,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one row: gl ([v = target] - p_v) - gh p_v (log p_v + entropy)."""
    index = tl.program_id(0).to(tl.int64)
    row = index * size
    top, total = tl.load(tops + index), tl.load(totals + index)
    log_total, entropy = tl.load(log_totals + index), tl.load(wide_entropies + index)
    gl, gh = tl.load(d_logprobs + index).to(tl.float64), tl.load(d_entropies + index).to(tl.float64)
    target = tl.load(targets + index)
    for start in range(0, size, BLOCK):
        k = start + tl.arange(0, BLOCK)
        shifted, live = shifted_at(scaled, eligible, row, k, size, top, MASKED)
        p = mass_of(shifted, live).to(tl.float64) / (tl.zeros((BLOCK,), dtype=tl.float64) + total)
        d = ((shifted.to(tl.float64) - log_total) + entropy) * p * gh
        d = (d + gl * p) * -1.0  # Triton's minus is 0 - x, which loses the sign of zero
        d = tl.where(k == target, d + gl, d)
        tl.store(gradient + row + k, d.to(tl.float32), mask=k < size)


@triton.jit
def scrambled(hashed, word):
    """One round of MurmurHash3 on 32-bit numbers held as int64."""
    k = (word * 0xCC9E2D51) & MASK32
    k = ((((k << 15) | (k >> 17)) & MASK32) * 0x1B873593) & MASK32
    h = hashed ^ k
    h = ((h << 13) | (h >> 19)) & MASK32
    return (h * 5 + 0xE6546B64) & MASK32


@triton.jit
def gumbel(seed, position, column):
    """`sampler.gumbel_noise` of some columns, float64."""
    h = scrambled(tl.zeros_like(column), seed & MASK32)
    h = scrambled(h, (seed >> 32) & MASK32)
    h = scrambled(h, position & MASK32)
    h = scrambled(h, column) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK32
    h = h ^ (h >> 16)
    u = h.to(tl.float64) / (tl.zeros(h.shape, dtype=tl.float64) + MASK32)
    log_u = tl.where(h > 0, log(tl.where(u < SMALLEST, SMALLEST, u)), -LARGEST)
    return -log(-tl.where(log_u > -(2.0**-32), -(2.0**-32), log_u))


@triton.jit
def sample(scaled, seeds, positions, tokens, finite, size, BLOCK: tl.constexpr):
    """The token of one row with the largest log p + gumbel; among equal ones the lowest."""
    index = tl.program_id(0).to(tl.int64)
    row = index * size
    top = largest_logit(scaled, scaled, row, size, False, BLOCK)
    whole, largest = total_mass(scaled, scaled, row, size, top, False, BLOCK)
    tl.store(finite + index, (largest < INFINITE).to(tl.int32))
    log_total = log(tl.where(largest < INFINITE, whole, 1).to(tl.float64) * INVERSE_UNIT)
    seed, position = tl.load(seeds + index), tl.load(positions + index)
    best, token = pow2(seed * 0) * -LARGEST, size + seed * 0  # below every value; no token
    for start in range(0, size, BLOCK):
        k = start + tl.arange(0, BLOCK)
        shifted, live = shifted_at(scaled, scaled, row, k, size, top, False)
        log_p = (shifted.to(tl.float64) - log_total).to(tl.float32).to(tl.float64)
        value = tl.where(live, log_p + gumbel(seed, position, k.to(tl.int64)), -LARGEST)
        highest = tl.max(value, 0)
        first = tl.min(tl.where((value == highest) & live, k.to(tl.int64), size), 0)
        token = tl.where(highest > best, first, token)
        best = tl.maximum(highest, best)
    tl.store(tokens + index, token)


def _refuse(finite: Tensor) -> None:
    if not bool(finite.all()):
        raise NumericsError(NOT_FINITE)


def forward(scaled: Tensor, targets: Tensor, eligible: Tensor | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Log-probs and entropies, float32 [n], and four numbers of each row for `backward`.

    scaled float32 [n, V], logits over temperature; targets int64 [n]; eligible bool [n, V] or None. NumericsError if
    logits are not finite.
    """
    n, size = scaled.shape
    narrow = [torch.empty(n, dtype=torch.float32, device=scaled.device) for _ in range(3)]
    wide = [torch.empty(n, dtype=torch.float64, device=scaled.device) for _ in range(3)]
    finite = torch.empty(n, dtype=torch.int32, device=scaled.device)
    statistics[(n,)](
        scaled, scaled if eligible is None else eligible.view(torch.uint8), targets, *narrow, *wide, finite, size,
        value_bits(size), MASKED=eligible is not None, BLOCK=blocks_of(size, 512)[0], **WARPS4,
    )  # fmt: skip
    _refuse(finite)
    return narrow[0], narrow[1], (narrow[2], *wide)


def backward(
    scaled: Tensor,
    targets: Tensor,
    eligible: Tensor | None,
    rows: tuple[Tensor, ...],
    d_logprobs: Tensor,
    d_entropies: Tensor,
) -> Tensor:
    """The gradient of `scaled`, float32 [n, V], from those of log-probs and entropies; `rows` of `forward`."""
    n, size = scaled.shape
    gradient = torch.empty_like(scaled)
    statistics_backward[(n,)](
        scaled, scaled if eligible is None else eligible.view(torch.uint8), targets, *rows,
        d_logprobs.contiguous(), d_entropies.contiguous(), gradient, size,
        MASKED=eligible is not None, BLOCK=blocks_of(size, 512)[0], **WARPS4,
    )  # fmt: skip
    return gradient


def sampled(scaled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Tokens int64 [n] of scaled float32 [n, V]; seeds, positions int64 [n]. NumericsError if logits are not finite."""
    n, size = scaled.shape
    tokens, finite = seeds.new_empty(n), torch.empty(n, dtype=torch.int32, device=scaled.device)
    sample[(n,)](scaled, seeds, positions, tokens, finite, size, BLOCK=blocks_of(size, 512)[0], **WARPS4)
    _refuse(finite)
    return tokens
