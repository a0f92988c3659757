"""Counter-based sampling: a token is a pure function of (logits, seed, position).

The method is Gumbel-max with the hash noise of SGLang's seeded sampler, so that equal logits give equal tokens in both
engines, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.base.mode import Mode, is_deterministic_mode
from ppo_repro.engine import Sampling
from ppo_repro.numerics.logit_rows import require_finite
from ppo_repro.numerics.token_sampling import cut_tokens, pack_bits, sample_tokens
from ppo_repro.numerics.token_statistics import token_statistics

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Sample:
    """One sampled token for each of n positions."""

    tokens: Tensor  # [n] int64
    logprobs: Tensor  # [n] float32, under the distribution sampled from
    log_kept_mass: Tensor  # [n] float32
    kept_tokens: Tensor  # [n, ceil(V/8)] uint8 or [n, 0]


def _rotate(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _times(x: Tensor, factor: int) -> Tensor:
    # int64 products wrap, but their low 32 bits are those of the unsigned product
    return (x * factor) & _MASK


def murmur_hash32(words: list[Tensor]) -> Tensor:
    """Compute MurmurHash3 x86 32-bit, hash seed 0, of little-endian 32-bit words in int64 in [0, 2^32).

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


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, sampling: Sampling, mode: Mode) -> Sample:
    """Sample one token per row: argmax over eligible v of log p_v + gumbel(seed, position, column_v).

    The column is the token id or, with top-k or top-p, the token's rank, as in SGLang.

    Args:
        logits: [n, V] float32.
        seeds: [n] int64, of the responses.
        positions: [n] int64, of the last input token.
        sampling: temperature, top-k and top-p.
        mode: deterministic or native numerics.
    """
    temperature = sampling.temperature
    eligible, kept, log_kept_mass = None, None, torch.zeros(len(logits))
    packed = torch.empty(len(logits), 0, dtype=torch.uint8)
    if sampling.cuts:
        eligible, rank, log_kept_mass = cut_tokens(_divided(logits, temperature), sampling.top_k, sampling.top_p)
        kept, packed = (eligible, rank), pack_bits(eligible)
    if sampling.greedy:
        require_finite(logits)
        tokens = first_argmax(_divided(logits, temperature)).cpu()
    else:
        tokens, logprobs = sample_tokens(logits, seeds, positions, temperature, kept)
    if sampling.greedy or sampling.cuts or not is_deterministic_mode(mode):
        logprobs, _ = token_statistics(logits, tokens, temperature, eligible, mode)
    return Sample(tokens, logprobs, log_kept_mass, packed)


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature, rounded once; a GPU would multiply by the inverse of a Python number."""
    return logits / logits.new_tensor(temperature)


def first_argmax(x: Tensor) -> Tensor:
    """Return the index of the maximum along the last axis, the lowest of several: [.., V] -> [..] int64."""
    columns = torch.arange(x.shape[-1], device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), columns, x.shape[-1]).amin(-1)
