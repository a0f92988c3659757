"""Draw tokens: a token is a pure function of (logits, seed, position).

The method is Gumbel-max. Its noise is a hash of seed, position and token (`numerics/definition/sampling.py`), as in
SGLang's seeded sampler: equal logits give equal tokens in both samplers, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.base.mode import Mode, is_deterministic_mode
from ppo_repro.numerics.logit_rows import require_finite
from ppo_repro.numerics.token_sampling import cut_tokens, pack_bits, sample_tokens
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.sampler import Sampling


@dataclass(frozen=True)
class DrawnTokens:
    """One sampled token for each of n positions."""

    tokens: Tensor  # [n] int64
    logprobs: Tensor  # [n] float32, under the distribution sampled from
    log_kept_mass: Tensor  # [n] float32
    kept_tokens: Tensor  # [n, ceil(V/8)] uint8 or [n, 0]


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, sampling: Sampling, mode: Mode) -> DrawnTokens:
    """Sample one token per row: argmax over eligible v of log p_v + gumbel(seed, position, column_v).

    The column is the token id or, with top-k or top-p, the token's rank, as in SGLang.

    Args:
        logits: [n, V] float32.
        seeds: [n] int64, of the responses.
        positions: [n] int64, of the last input token.
    """
    temperature = sampling.temperature
    eligible, cut, log_kept_mass = None, None, torch.zeros(len(logits))
    packed = torch.empty(len(logits), 0, dtype=torch.uint8)
    if sampling.cuts:
        eligible, rank, log_kept_mass = cut_tokens(_divided(logits, temperature), sampling.top_k, sampling.top_p)
        cut, packed = (eligible, rank), pack_bits(eligible)
    if sampling.greedy:
        require_finite(logits)
        tokens = first_argmax(_divided(logits, temperature)).cpu()
    else:
        tokens, logprobs = sample_tokens(logits, seeds, positions, temperature, cut)
    if sampling.greedy or sampling.cuts or not is_deterministic_mode(mode):
        logprobs, _ = token_statistics(logits, tokens, temperature, eligible, mode)
    return DrawnTokens(tokens, logprobs, log_kept_mass, packed)


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature, rounded once; a GPU would multiply by the inverse of a Python number."""
    return logits / logits.new_tensor(temperature)


def first_argmax(x: Tensor) -> Tensor:
    """Return the index of the maximum along the last axis, the lowest of several: [.., V] -> [..] int64."""
    columns = torch.arange(x.shape[-1], device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), columns, x.shape[-1]).amin(-1)
