"""Noise, kept tokens and sampled tokens by the C kernels.

Noise is counter-based: a pure function of seed, position and column, by the hash of SGLang's seeded sampler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics import library
from ppo_repro.numerics.structs import at, at_rows
from ppo_repro.numerics.token_statistics import check_rows, softmax_rows


def gumbel_noise(seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    """Gumbel(0, 1) noise g = -ln(-ln u), float64 [n, columns], u = hash(seed, position, column) / (2^32 - 1).

    seeds, positions int64 [n]. ln u is clamped to [-DBL_MAX, -2^-32], as in SGLang.
    """
    return _noise("gumbel_noise", seeds, positions, columns)


def normal_noise(seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    """Standard normal noise z = sqrt(-2 ln u) cos(2 pi v), float64 [n, columns], independent of the Gumbel noise.

    u, v = (h + 1/2) / 2^32 with h = hash(1 for u and 2 for v, seed, position, column); |z| < 6.8. seeds,
    positions int64 [n]. Box and Muller, 1958.
    """
    return _noise("normal_noise", seeds, positions, columns)


def _noise(function: str, seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    out = torch.empty(len(seeds), columns, dtype=torch.float64)
    seeds, positions = seeds.contiguous(), positions.contiguous()
    addresses = at(seeds, torch.int64), at(positions, torch.int64)
    getattr(library.load(), function)(*addresses, len(seeds), columns, at(out, torch.float64))
    return out


def cut_tokens(scaled: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens top-k and top-p keep: (eligible bool [n, V], rank int32 [n, V], log kept mass float32 [n]).

    scaled: logits / temperature, float32 [n, V]. Tokens are ranked by falling logit, ties by id. A token is kept while
    its rank is below top_k (0: no limit) and the mass before it is at most top_p; the likeliest is always kept. Masses
    are exp(scaled - largest), added one by one by rank in float64. Raises NumericsError if logits are not finite.
    """
    n, v = scaled.shape
    scaled = scaled.contiguous()
    order = torch.argsort(scaled, dim=-1, descending=True, stable=True)
    eligible, rank, log_kept = torch.empty(n, v, dtype=torch.bool), torch.empty(n, v, dtype=torch.int32), torch.empty(n)
    results = at(eligible, torch.bool), at(rank, torch.int32), at(log_kept)
    check_rows(library.load().cut_tokens(at(scaled), at(order, torch.int64), n, v, top_k, top_p, *results))
    return eligible, rank, log_kept


def sample_tokens(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float, cut: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """(tokens int64 [n], their log p float32 [n]): argmax of log p_v + gumbel(seed, position, column_v), first of ties.

    logits float32 [n, V]; seeds, positions int64 [n]. p is softmax(logits / temperature) over all tokens, log p is
    rounded to float32. `cut`: which tokens are eligible, bool [n, V], and the column of each, int32 [n, V]; without it
    all tokens are eligible and the column is the token's id. Raises NumericsError if logits are not finite.
    """
    n, v = logits.shape
    logits = logits.detach() if logits.stride(1) == 1 else logits.detach().contiguous()
    seeds, positions = seeds.contiguous(), positions.contiguous()
    tokens, logprobs, rows = torch.empty(n, dtype=torch.int64), torch.empty(n), softmax_rows(n)
    kept = (None, None) if cut is None else (at(cut[0], torch.bool), at(cut[1], torch.int32))
    arguments = (*at_rows(logits), n, v, temperature, at(seeds, torch.int64), at(positions, torch.int64), *kept)
    check_rows(library.load().sample_tokens(*arguments, at(tokens, torch.int64), at(logprobs), at(rows, torch.float64)))
    return tokens, logprobs
