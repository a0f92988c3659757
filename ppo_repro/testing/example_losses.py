"""Losses for the conformance kit: right ones, and two faults that were found in training stacks.

Both faults give the right number on one micro-batch, so that no unit test of the loss alone sees them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.testing.losses import LossBatch, LossRollout

KL_COV_SHARE, KL_COEF = 0.25, 1.0


def _surrogate(batch: LossBatch) -> Tensor:
    """-A exp(new - old) of each token, [R, L]."""
    ratios = torch.exp(batch.new_logprobs - batch.columns["old_logprobs"])
    return -batch.columns["advantages"] * ratios


def _total(values: Tensor, batch: LossBatch) -> Tensor:
    return values.masked_fill(~batch.mask, 0.0).sum()


def step_token_mean(batch: LossBatch) -> Tensor:
    """Token mean over the whole step; micro-batches and ranks are summed. Conforms."""
    return _total(_surrogate(batch), batch) / batch.step_tokens


def micro_batch_token_mean(batch: LossBatch) -> Tensor:
    """Token mean of each micro-batch; their mean gives tokens of short responses more weight. Does not conform."""
    return _total(_surrogate(batch), batch) / batch.mask.sum()


def padded_token_mean(batch: LossBatch) -> Tensor:
    """Mean over all positions, padding included. Does not conform."""
    return _total(_surrogate(batch), batch) / batch.mask.numel()


def kl_cov(batch: LossBatch) -> Tensor:
    """KL-Cov: a KL penalty on the tokens with the largest covariance of log-prob and advantage. Cui et al., 2025.

    The tokens are chosen among those of the micro-batch, so that the batch layout decides which are penalised. Does not
    conform.
    """
    valid = batch.mask
    advantages, logprobs = batch.columns["advantages"][valid], batch.new_logprobs[valid]
    covariances = (advantages - advantages.mean()) * (logprobs.detach() - logprobs.detach().mean())
    chosen = torch.topk(covariances, max(1, int(KL_COV_SHARE * len(covariances)))).indices
    values = _surrogate(batch)[valid]
    penalties = torch.zeros_like(values)
    penalties[chosen] = KL_COEF * (logprobs - batch.columns["old_logprobs"][valid]).abs()[chosen]
    return (values + penalties).sum() / batch.step_tokens


def kl_cov_of_the_step(batch: LossBatch) -> Tensor:
    """KL-Cov whose tokens were chosen before the step was cut into micro-batches, column `is_penalised`. Conforms."""
    difference = (batch.new_logprobs - batch.columns["old_logprobs"]).abs()
    values = _surrogate(batch) + KL_COEF * difference * batch.columns["is_penalised"]
    return _total(values, batch) / batch.step_tokens


def _column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# three responses of 5, 1 and 2 tokens
EXAMPLE = LossRollout(
    lengths=(5, 1, 2),
    new_logprobs=_column(-1.0, -2.0, -0.5, -1.5, -3.0, -0.25, -2.5, -0.75),
    columns={
        "old_logprobs": _column(-1.25, -2.0, -0.75, -1.25, -3.5, -0.5, -2.25, -1.0),
        "advantages": _column(0.1, 0.1, 0.1, 0.1, 0.1, 1.0, -1.4, -1.4),
    },
)
