"""Per-token rewards: the KL penalty on every token, the score on the last one."""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(scores: Tensor, kl_penalties: Tensor, lengths: Tensor) -> Tensor:
    """r_t = -kl_penalties_t, and + score at a response's last token. Ouyang et al., 2022, equation 2.

    scores [B], kl_penalties [N] float32, lengths [B] int64 with sum N -> [N] float32.
    """
    rewards = -kl_penalties
    last = torch.cumsum(lengths, 0) - 1
    rewards[last] = rewards[last] + scores.to(torch.float32)
    return rewards
