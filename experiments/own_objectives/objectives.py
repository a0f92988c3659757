"""Define two published objectives that the package does not have, as functions of a batch of tokens."""

import torch
from torch import Tensor

from ppo_repro.numerics import exp, sigmoid
from ppo_repro.ppo.own_batches import ObjectiveBatch


def sapo(batch: ObjectiveBatch, tau_positive: float, tau_negative: float) -> Tensor:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A at each token: a soft gate in place of the clip.

    Gao et al., 2025, "Soft Adaptive Policy Optimization", arXiv 2511.20347.
    """
    tau = torch.where(batch.advantages > 0, tau_positive, tau_negative)
    return -(sigmoid(tau * (batch.ratios - 1.0)) * (4.0 / tau) * batch.advantages)


def gmpo(batch: ObjectiveBatch, log_clip: float) -> tuple[Tensor, Tensor]:
    """Return -(geometric mean of the clipped ratios) A of each response, and the tokens that the clip changed.

    Zhao et al., 2025, "Geometric-Mean Policy Optimization", arXiv 2507.20673; log_clip 0.4 in the paper.
    """
    sign = torch.where(batch.advantages > 0, 1.0, -1.0)
    signed = sign * (batch.new_logprobs - batch.anchor_logprobs)
    cut = (signed > log_clip) & (batch.advantages != 0)
    bounded = sign * torch.where(cut, log_clip, signed)
    return -(exp(batch.response_means(bounded)) * batch.response_means(batch.advantages)), cut
