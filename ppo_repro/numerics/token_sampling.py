"""Cut the vocabulary by top-k and top-p, sample tokens, and pack the kept tokens of each row as bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ppo_repro.numerics.interface import ffi, pointer
from ppo_repro.numerics.logit_rows import call, dense, row_pointer, softmax, softmax_rows


class KeptTokens(NamedTuple):
    """Tokens of n rows that top-k and top-p keep."""

    eligible: Tensor  # bool [n, V], where the logits are
    rank: Tensor  # int32 [n, V], by falling logit, where the logits are
    log_mass: Tensor  # ln of the probability of the kept tokens, float32 [n], on the CPU


def cut_tokens(scaled: Tensor, top_k: int, top_p: float) -> KeptTokens:
    """Return the tokens that top-k and top-p keep. `scaled` is logits / temperature, float32 [n, V].

    Tokens are ranked by falling logit, ties by id. A token is kept while its rank is below top_k (0: no limit) and the
    mass before it is at most top_p. The likeliest is always kept. Masses are exp(scaled - largest), added one by one by
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
    call("cut_tokens", cut, device)
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
    logits, seeds, positions = dense(logits.detach()), seeds.to(device).contiguous(), positions.to(device).contiguous()
    tokens, logprobs = torch.empty(n, dtype=torch.int64, device=device), torch.empty(n, device=device)
    rows = softmax_rows(n, device)
    z, ld = row_pointer(logits)
    a = ffi.new("Sampling *", dict(logits=z, ld=ld, n=n, v=logits.shape[1], temperature=temperature))
    a.seeds, a.positions = pointer(seeds, device), pointer(positions, device)
    if cut is not None:
        a.eligible, a.columns = pointer(cut[0], device), pointer(cut[1], device)
    a.tokens, a.logprobs, a.rows = pointer(tokens, device), pointer(logprobs, device), softmax(rows)
    call("sample_tokens", a, device)
    return tokens.cpu(), logprobs.cpu()


def expand_kept(kept_tokens: Tensor, vocab_size: int) -> Tensor | None:
    """Unpack bit sets [n, ceil(V/8)] uint8 to bool [n, V]; None (all tokens are eligible) for bit sets of width 0."""
    if kept_tokens.shape[1] == 0:
        return None
    return torch.from_numpy(np.unpackbits(kept_tokens.numpy(), axis=1, count=vocab_size).view(np.bool_))


def pack_bits(eligible: Tensor) -> Tensor:
    """Pack bool [n, V] to bit sets uint8 [n, ceil(V/8)] on the CPU, the first token in the highest bit."""
    return torch.from_numpy(np.packbits(eligible.cpu().numpy(), axis=1))
