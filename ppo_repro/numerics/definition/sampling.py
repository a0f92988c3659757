"""Compute rule 8, sampling: the token with the largest log-prob + Gumbel noise of seed, position and token."""

from __future__ import annotations

import math
import struct

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, D, F, exp32, log64, sin_cos64
from ppo_repro.numerics.definition.tokens import log_p, softmax

MASK = 0xFFFFFFFF


def murmur3(data: bytes, seed: int = 0) -> int:
    """Return MurmurHash3_x86_32 of bytes whose length is a multiple of 4. Kernels: `absorb`, `finish`.

    Appleby, 2011.
    """
    h = seed
    for (word,) in struct.iter_unpack("<I", data):
        k = word * 0xCC9E2D51 & MASK
        k = (k << 15 | k >> 17) & MASK
        h ^= k * 0x1B873593 & MASK
        h = (h << 13 | h >> 19) & MASK
        h = (h * 5 + 0xE6546B64) & MASK
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor & MASK
    return h ^ h >> 16


def hashes(seed: int, position: int, columns: Array, *first: int) -> Array:
    """Return a hash for each column, float64 [columns], of little-endian words.

    The words are `first`, the seed as uint64, the position and the column as uint32.
    """
    words = struct.pack(f"<{len(first)}IQI", *first, seed % 2**64, position % 2**32)
    return np.array([murmur3(words + struct.pack("<I", column)) for column in columns], D)


def gumbel_of(h: Array) -> Array:
    """Return Gumbel noise -ln(-ln(h / (2^32 - 1))) with ln in [-DBL_MAX, -2^-32]; float64. Kernel: `gumbel_of_hash`."""
    log_u = np.where(h > 0, log64(np.maximum(h, 1.0) / MASK), -np.finfo(D).max)
    return -log64(-np.minimum(log_u, -(2.0**-32)))


def gumbel_noise(seed: int, position: int, columns: Array) -> Array:
    """Return Gumbel noise of each column, as in SGLang's seeded sampler; float64 [columns]."""
    return gumbel_of(hashes(seed, position, columns))


def normal_noise(seed: int, position: int, columns: Array) -> Array:
    """Return normal noise sqrt(-2 ln u) cos(2 pi v), float64. Box and Muller, 1958. Kernel: `normal_noise`.

    u and v are (h + 1/2) / 2^32, where h is the hash with the first word 1 for u, and 2 for v.
    """
    u, v = ((hashes(seed, position, columns, first) + 0.5) * 2.0**-32 for first in (1, 2))
    return np.sqrt(log64(u) * -2.0) * sin_cos64(v * (2.0 * math.pi))[1]


def cut(scaled: Array, top_k: int, top_p: float) -> tuple[Array, Array, Array]:
    """Return (eligible [V], rank [V], log of the kept mass) of one row of logits / temperature [V].

    Tokens are ranked by falling logit, ties by id, and their masses added one by one by rank in float64.

    Kernel: `cut_row`.
    """
    order = sorted(range(len(scaled)), key=lambda v: (-scaled[v], v))
    e = exp32(scaled - scaled[order[0]]).astype(D)
    total = D(0)
    for v in order:
        total += e[v]
    eligible, rank, before = np.zeros(len(scaled), bool), np.empty(len(scaled), np.int32), D(0)
    for i, v in enumerate(order):
        rank[v] = i
        if (not top_k or i < top_k) and before <= top_p * total:
            eligible[v] = True
            before += e[v]
    return eligible, rank, log64(np.array([before / total]))[0].astype(F)


def sample(
    z: Array, seed: int, position: int, temperature: float, kept: tuple[Array, Array] | None
) -> tuple[int, np.float32]:
    """Compute rule 8: the first v with the largest log p_v + noise in one row of logits, and log p_v.

    Kernel: `sample_row`.

    Args:
        z: logits [V].
        seed: seed of the response.
        position: position of the token.
        temperature: above 0.
        kept: (eligible, column of the noise), [V] each; None: all tokens, each with its own id as its column.
    """
    row = log_p(softmax(z[None], temperature, None))[0]
    eligible, columns = (None, np.arange(len(z))) if kept is None else kept
    scores = row.astype(D) + gumbel_noise(seed, position, columns)
    token = int((scores if eligible is None else np.where(eligible, scores, -np.inf)).argmax())
    return token, row[token]
