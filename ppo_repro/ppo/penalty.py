"""PPO-Penalty: a KL penalty instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ppo_repro.ppo.kl import k3_loss
from ppo_repro.ppo.objective import Objective


@dataclass(frozen=True)
class Penalty(Objective):
    """-r A + beta (r - 1 - log r). Schulman et al., 2017, equation 8.

    The penalty (k3) is an unbiased estimate of KL(anchor || new) from tokens drawn from the anchor. Its gradient
    in log pi_new, beta (r - 1), is in expectation the divergence's, and zero before the first step.
    """

    penalty_coef: float

    def penalties(self, log_ratios: Tensor, chosen: Tensor | None = None) -> Tensor | None:
        return k3_loss(-log_ratios) * self.penalty_coef
