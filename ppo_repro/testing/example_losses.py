"""Losses for the conformance kit: right ones, and faults that were found in training stacks.

Most faults give the right number on one micro-batch, so that no unit test of the loss alone sees them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.testing.losses import LossBatch, LossRollout

KL_COV_SHARE, KL_COEF = 0.25, 1.0


def _log_ratios(batch: LossBatch) -> Tensor:
    """new - old, [R, L], 0 under the mask: masked before anything is computed, so that no junk reaches a gradient."""
    return (batch.new_logprobs - batch.columns["old_logprobs"]).masked_fill(~batch.mask, 0.0)


def _surrogate(batch: LossBatch) -> Tensor:
    """-A exp(new - old) of each token, [R, L]; the log-ratio is clamped, so that exp does not overflow in float32."""
    advantages = batch.columns["advantages"].masked_fill(~batch.mask, 0.0)
    return -advantages * _log_ratios(batch).clamp(-20.0, 20.0).exp()


def _total(values: Tensor, batch: LossBatch) -> Tensor:
    return values.masked_fill(~batch.mask, 0.0).sum()


def masked_afterwards(batch: LossBatch) -> Tensor:
    """Multiplied by the mask at the end: a NaN under the mask stays a NaN. Does not conform."""
    ratios = (batch.new_logprobs - batch.columns["old_logprobs"]).exp()
    return (-batch.columns["advantages"] * ratios * batch.mask).sum() / batch.step_tokens


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
    chosen = batch.columns["is_penalised"].masked_fill(~batch.mask, 0.0)
    values = _surrogate(batch) + KL_COEF * _log_ratios(batch).abs() * chosen
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
