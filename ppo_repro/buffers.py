"""One frozen type per stage of an iteration. Holding a value proves that its stage has run.

Letters: B sequences (responses), N response tokens of all sequences one after the other without
padding, V vocabulary. Log-probabilities and entropies are in nats. Nothing here is ever None.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompts:
    """What is asked in one iteration, one entry per response to sample."""

    keys: tuple[str, ...]  # [B] stable name of the prompt in its task
    sample_indices: tuple[int, ...]  # [B] which sample of that prompt
    seeds: tuple[int, ...]  # [B] sampler seed of the response
    texts: tuple[str, ...]  # [B]
    answers: tuple[str, ...]  # [B] what the verifier expects
    prompt_ids: tuple[tuple[int, ...], ...]  # [B] ragged


@dataclass(frozen=True)
class Rollout:
    """What the engine sampled. A token's log-prob is that of the distribution it was drawn from."""

    prompts: Prompts
    response_ids: Tensor  # [N] int64
    lengths: Tensor  # [B] int64, at least 1 each, sum N
    rollout_logprobs: Tensor  # [N] float32, temperature and top-k/top-p included
    log_kept_mass: Tensor  # [N] float32, log of the mass top-k/top-p kept; 0 where nothing was cut
    kept_tokens: Tensor  # [N, ceil(V/8)] uint8 bit set of eligible tokens; [N, 0] where nothing was cut
    is_forced: Tensor  # [N] bool, put there by the engine instead of sampled
    finish_reasons: tuple[str, ...]  # [B] "stop" or "length"
    responses: tuple[str, ...]  # [B] decoded text without special tokens

    def starts(self) -> Tensor:
        """[B] int64 index of each sequence's first token in the [N] fields."""
        return torch.cumsum(self.lengths, 0) - self.lengths

    def sequence_of_token(self) -> Tensor:
        """[N] int64 sequence each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    def tokens_of(self, sequences: Tensor) -> Tensor:
        """Indices into the [N] fields of the tokens of `sequences`, in the given order."""
        starts = self.starts()
        return torch.cat([torch.arange(int(starts[s]), int(starts[s] + self.lengths[s])) for s in sequences])


@dataclass(frozen=True)
class ForwardPass:
    """The training-side forward of policy, reference and value model before any update."""

    old_logprobs: Tensor  # [N] float32
    ref_logprobs: Tensor  # [N] float32
    ref_kl: Tensor  # [N] float32, KL(policy || reference) over the whole distribution at that position
    values: Tensor  # [N] float32, expected return before the token
    entropies: Tensor  # [N] float32
    prob_sq_sums: Tensor  # [N] float32, sum over the vocabulary of the squared probabilities


@dataclass(frozen=True)
class Rewards:
    """Verifier scores and what the KL penalty leaves of them."""

    scores: Tensor  # [B] float64
    is_correct: Tensor  # [B] bool, the response equals the expected answer and ended by itself
    kl_penalties: Tensor  # [N] float32, kl_coef times the KL estimate
    rewards: Tensor  # [N] float32, score at the last token minus the penalty


@dataclass(frozen=True)
class Advantages:
    """Generalized advantage estimates and the value targets."""

    raw_advantages: Tensor  # [N] float32
    advantages: Tensor  # [N] float32, whitened if configured
    returns: Tensor  # [N] float32, raw_advantages + values


@dataclass(frozen=True)
class MinibatchUpdate:
    """One optimizer step of policy and value model, and what it saw. M tokens in the minibatch."""

    epoch: int
    minibatch: int
    tokens: Tensor  # [M] int64 index into the [N] fields
    new_logprobs: Tensor  # [M] float32, before this step
    ratios: Tensor  # [M] float32, exp(new_logprobs - anchor)
    clip_flags: Tensor  # [M] uint8, index into ppo.losses.CLIP_FLAGS
    new_values: Tensor  # [M] float32
    value_clipped: Tensor  # [M] bool, the clipped branch decided the value loss
    new_entropies: Tensor  # [M] float32
    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float  # KL(anchor || new), k3, token mean
    clip_fraction: float  # tokens whose policy gradient the clip removed
    value_clip_fraction: float
    grad_norm: float
    value_grad_norm: float
    gradient_redos: int
    value_gradient_redos: int
    policy_digest: str  # weights after the step
    value_digest: str
