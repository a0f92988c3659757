"""The weight of each token's loss: how losses are reduced, and corrections for tokens another policy sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.numerics.arithmetic.grid import exact_sums


def loss_weights(aggregation: str, lengths: Tensor) -> Tensor:
    """Weight of each token in a minibatch of S sequences: `lengths` [S] int64 -> [M] float32, M the sum of the lengths.

    token_mean: 1 / M. sequence_mean: 1 / (S length), the mean over sequences of their token means.
    sequence_sum: 1 / S, the mean over sequences of their token sums.
    """
    assert lengths.shape == (lengths.numel(),)
    count, total = len(lengths), int(lengths.sum())
    by_sequence = {
        "token_mean": torch.full((count,), 1.0 / total, dtype=torch.float64),
        "sequence_mean": 1.0 / (lengths.to(torch.float64) * count),
        "sequence_sum": torch.full((count,), 1.0 / count, dtype=torch.float64),
    }[aggregation]
    return torch.repeat_interleave(by_sequence.to(torch.float32), lengths)


def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor, cap: float, masked: bool, by_sequence: bool
) -> Tensor:
    """min(w, cap), or `masked` w where 1/cap <= w <= cap and 0 elsewhere; w = pi_old / pi_rollout. [N] float32.

    Truncated (TIS, Yao et al., 2025) or masked importance sampling, which corrects for a sampler that differs from
    the trained policy. `by_sequence`: w of a token is the product over its whole response. Exactly 1 where the two
    agree.
    """
    assert old_logprobs.shape == rollout_logprobs.shape == (int(lengths.sum()),) and lengths.dim() == 1
    log_ratio = old_logprobs - rollout_logprobs
    if by_sequence:
        sums = exact_sums(log_ratio, lengths).to(torch.float32)
        log_ratio = torch.repeat_interleave(sums, lengths)
    weights = elementwise.exp(log_ratio)
    bound = torch.tensor(cap, dtype=torch.float32)
    if not masked:
        return torch.minimum(weights, bound)
    return torch.where((weights <= bound) & (weights >= 1.0 / bound), weights, 0.0)
