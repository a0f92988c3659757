"""Counter-based sampling: a token is a pure function of (logits, seed, position).

Gumbel-max with the hash noise of SGLang's seeded sampler, so that equal logits give equal tokens in both engines,
whatever else is in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.numerics.arithmetic.distribution import distribution, require_finite
from ppo_repro.numerics.arithmetic.elementwise import cos_sin, log, sqrt
from ppo_repro.numerics.kernels import gumbel as noise
from ppo_repro.numerics.logprobs import pack_bits, token_statistics, top_logits
from ppo_repro.rollout.engine import Sampling

_MASK = 0xFFFFFFFF
_FLOAT64_MAX = 1.7976931348623157e308
# first words of the hashes for normal noise; those for Gumbel noise have one word less
_RADIUS, _ANGLE = 1, 2
_EVERYWHERE = 2**32 - 1  # a position that no token has


@dataclass(frozen=True)
class Sample:
    """One token for each of n positions."""

    tokens: Tensor  # [n] int64
    logprobs: Tensor  # [n] float32, under the distribution sampled from
    log_kept_mass: Tensor  # [n] float32
    kept_tokens: Tensor  # [n, ceil(V/8)] uint8 or [n, 0]
    top_ids: Tensor  # [n, K] int32
    top_logits: Tensor  # [n, K] float32


def _rotate(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _times(x: Tensor, factor: int) -> Tensor:
    # int64 products wrap, but their low 32 bits are those of the unsigned product
    return (x * factor) & _MASK


def murmur_hash32(words: list[Tensor]) -> Tensor:
    """MurmurHash3 x86 32-bit, hash seed 0, of little-endian 32-bit words held as int64 in [0, 2^32).

    The words broadcast against each other. Appleby, 2011.
    """
    h = torch.zeros((), dtype=torch.int64)
    for word in words:
        k = _times(_rotate(_times(word, 0xCC9E2D51), 15), 0x1B873593)
        h = (_times(_rotate(h ^ k, 13), 5) + 0xE6546B64) & _MASK
    h = h ^ (4 * len(words))
    h = _times(h ^ (h >> 16), 0x85EBCA6B)
    h = _times(h ^ (h >> 13), 0xC2B2AE35)
    return h ^ (h >> 16)


def _words(seeds: Tensor, positions: Tensor, columns: int) -> list[Tensor]:
    by_row = [seeds & _MASK, (seeds >> 32) & _MASK, positions & _MASK]
    return [*(word[:, None] for word in by_row), torch.arange(columns, device=seeds.device)[None, :]]


def gumbel_noise(seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    """Gumbel(0, 1) noise g = -log(-log u), float64 [n, columns], u = hash(seed, position, column) / (2^32 - 1).

    seeds, positions int64 [n]. log u is clamped to [-DBL_MAX, -2^-32] as SGLang does.
    """
    h = murmur_hash32(_words(seeds, positions, columns))
    u = elementwise.divided(h.to(torch.float64), _MASK)
    log_u = torch.where(h > 0, log(u.clamp(min=1e-300)), -_FLOAT64_MAX)
    return -log(-log_u.clamp(max=-(2.0**-32)))


def normal_noise(seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    """Standard normal noise z = sqrt(-2 ln u) cos(2 pi v), float64 [n, columns], independent of the Gumbel noise.

    u, v = (h + 1/2) / 2^32 with h = hash(1 for u and 2 for v, seed, position, column); |z| < 6.8. seeds,
    positions int64 [n]. Box and Muller, 1958.
    """
    words = _words(seeds, positions, columns)
    hashes = (murmur_hash32([torch.tensor(first), *words]) for first in (_RADIUS, _ANGLE))
    u, v = ((h.to(torch.float64) + 0.5) * 2.0**-32 for h in hashes)
    return sqrt(log(u) * -2.0) * cos_sin(v * (2.0 * math.pi))[0]


def disturbed(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float, sigma: float) -> Tensor:
    """logits + temperature sigma z, float32 [n, V], rounded once; z is `normal_noise` of the token's id.

    It imitates a sampler whose logits / temperature have an error of standard deviation sigma. To first
    order in sigma^2, KL(sampler || model) and KL(model || sampler) are both sigma^2 / 2 (1 - sum_v p_v^2) nats.
    """
    offsets = normal_noise(seeds, positions, logits.shape[-1]) * (temperature * sigma)
    return (logits.to(torch.float64) + offsets).to(torch.float32)


def biased(logits: Tensor, seed: int, temperature: float, size: float) -> Tensor:
    """logits + temperature size z, float32 [n, V], rounded once; z is one standard normal number for each token's id.

    It imitates a sampler that prefers some tokens everywhere, as one with a wrong row in its last matrix does.
    """
    z = normal_noise(torch.tensor([seed]), torch.tensor([_EVERYWHERE]), logits.shape[-1])
    return (logits.to(torch.float64) + z.to(logits.device) * (temperature * size)).to(torch.float32)


def cut(scaled: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens top-k/top-p keep: (eligible bool [n, V], rank int64 [n, V], log kept mass float32 [n]).

    Tokens are ranked by falling logit, ties by id. A token is kept while its rank is below top_k and the
    mass before it is at most top_p; the likeliest is always kept. Masses are exact integers.
    """
    d = distribution(scaled, None)
    order = torch.argsort(scaled, dim=-1, descending=True, stable=True)
    masses = d.masses.to(torch.int64).gather(-1, order)
    before = masses.cumsum(-1) - masses
    kept = before <= sampling.top_p * d.total
    if sampling.top_k:
        kept[:, sampling.top_k :] = False
    ranks = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, ranks)
    eligible = torch.zeros_like(kept).scatter_(-1, order, kept)
    kept_mass = d.masses.to(torch.int64).masked_fill(~eligible, 0).sum(-1, keepdim=True).to(torch.float64)
    return eligible, rank, log(kept_mass / d.total)[:, 0].to(torch.float32)


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, sampling: Sampling, mode: str) -> Sample:
    """One token per row: argmax over eligible v of log p_v + gumbel(seed, position, column_v).

    logits float32 [n, V]; seeds, positions int64 [n], the position being that of the last input token.
    The column is the token id, or the token's rank where top-k/top-p cut, as in SGLang. With a `mismatch_sigma`
    everything is computed from `disturbed` logits, which are used nowhere else.
    """
    if sampling.mismatch_sigma:
        logits = disturbed(logits, seeds, positions, sampling.temperature, sampling.mismatch_sigma)
    if sampling.token_bias:
        logits = biased(logits, sampling.bias_seed, sampling.temperature, sampling.token_bias)
    top = top_logits(logits, sampling.temperature, sampling.top_logits)
    fused = backend.has_kernels(logits) and not sampling.greedy
    if fused and mode == "exact" and not sampling.cuts:
        tokens, logprobs = _sample_fused(logits, seeds, positions, sampling.temperature, None)
        return Sample(tokens, logprobs, torch.zeros(len(logits)), torch.empty(len(logits), 0, dtype=torch.uint8), *top)
    require_finite(logits)
    scaled = elementwise.divided(logits, sampling.temperature)
    kept, log_kept_mass = None, torch.zeros(len(logits))
    packed = torch.empty(len(logits), 0, dtype=torch.uint8)
    if sampling.cuts:
        eligible, rank, log_kept_mass = cut(scaled, sampling)
        kept, packed = (eligible, rank), pack_bits(eligible)
    if sampling.greedy:
        tokens = first_argmax(scaled)
    elif fused:
        tokens, _ = _sample_fused(logits, seeds, positions, sampling.temperature, kept)
    else:
        tokens = _sample_eager(scaled, seeds, positions, kept)
    logprobs, _ = token_statistics(logits, tokens, sampling.temperature, kept and kept[0], mode)
    return Sample(tokens, logprobs, log_kept_mass, packed, *top)


def _sample_eager(scaled: Tensor, seeds: Tensor, positions: Tensor, kept: tuple[Tensor, Tensor] | None) -> Tensor:
    d = distribution(scaled, None)
    log_p = (d.shifted.to(torch.float64) - d.log_total).to(torch.float32).to(torch.float64)
    gumbel = gumbel_noise(seeds, positions, scaled.shape[-1])
    if kept is not None:
        eligible, rank = kept
        gumbel = gumbel.gather(-1, rank)
        log_p = log_p.masked_fill(~eligible, float("-inf"))
    return first_argmax(log_p + gumbel)


def _sample_fused(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float, kept: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The tokens of `_sample_eager` by a kernel, and their log-probs in the whole distribution."""
    rows, seed, position = (x.detach().contiguous().numpy() for x in (logits, seeds, positions))
    arrays = None if kept is None else (kept[0].numpy(), kept[1].numpy())
    tokens, logprobs = noise.sample(rows, seed, position, temperature, arrays)
    return torch.from_numpy(tokens), torch.from_numpy(logprobs)


def first_argmax(x: Tensor) -> Tensor:
    """Index of the maximum along the last axis; among equal ones the lowest."""
    columns = torch.arange(x.shape[-1], device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), columns, x.shape[-1]).amin(-1)
