"""One frozen type per stage of an iteration. Holding a value proves that its stage has run.

Letters: B sequences (responses), N response tokens of all sequences one after the other without
padding, V vocabulary. Log-probabilities and entropies are in nats. A field is None only where the
configuration has no such thing, which its comment says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
class Spans:
    """Per token of one response; `char_start[t] == char_end[t]` for a token without text of its own."""

    char_start: list[int]
    char_end: list[int]
    byte_start: list[int]
    byte_end: list[int]
    word_id: list[int]
    sub_idx: list[int]


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
    places: tuple[Spans, ...]  # [B] where each token's text lies in the response

    def starts(self) -> Tensor:
        """[B] int64 index of each sequence's first token in the [N] fields."""
        return torch.cumsum(self.lengths, 0) - self.lengths

    def sequence_of_token(self) -> Tensor:
        """[N] int64 sequence each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    def word_ids(self) -> Tensor:
        """[N] int64 word of each token, counted within its response."""
        return torch.tensor([word for place in self.places for word in place.word_id], dtype=torch.int64)

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
    reverse_ref_kl: Tensor | None  # [N] float32, KL(reference || policy) likewise; None unless it is charged
    entropies: Tensor  # [N] float32
    prob_sq_sums: Tensor  # [N] float32, sum over the vocabulary of the squared probabilities
    values: Tensor | None  # [N] float32, expected return before the token; None without a value model
    final_values: Tensor  # [B] float32, the same after the last token where a cut response is bootstrapped, else 0


@dataclass(frozen=True)
class Rewards:
    """Scores, and what the KL penalty, placement and shaping make of them."""

    scores: Tensor  # [B] float64
    score_parts: tuple[tuple[float, ...], ...]  # [B] unweighted value of every reward term
    is_correct: Tensor  # [B] bool, the response equals the expected answer and ended by itself
    kl_penalties: Tensor  # [N] float32, kl_coef times the KL estimate, where it is charged; 0 if in no reward
    rewards: Tensor  # [N] float32, what the advantages are made of


@dataclass(frozen=True)
class Advantages:
    """Advantages and the value targets."""

    raw_advantages: Tensor  # [N] float32
    advantages: Tensor  # [N] float32, whitened if configured
    returns: Tensor | None  # [N] float32, raw_advantages + values; None without a value model


@dataclass(frozen=True)
class PolicyUpdate:
    """One optimizer step of the policy and what it saw before it. M tokens in the minibatch."""

    new_logprobs: Tensor  # [M] float32
    ratios: Tensor  # [M] float32, exp(new_logprobs - anchor)
    clip_flags: Tensor  # [M] uint8, index into ppo.losses.CLIP_FLAGS
    new_entropies: Tensor  # [M] float32
    loss: float  # all terms, weighted as configured
    entropy: float  # token mean
    approx_kl: float  # KL(anchor || new), k3, token mean
    clip_fraction: float  # tokens whose policy gradient the clip removed
    grad_norm: float
    gradient_redos: int


@dataclass(frozen=True)
class ValueUpdate:
    """One optimizer step of the value model and what it saw before it."""

    new_values: Tensor  # [M] float32
    clipped: Tensor  # [M] bool, the clipped branch decided the value loss
    loss: float
    clip_fraction: float
    grad_norm: float | None  # None where the value head shares the policy's step
    gradient_redos: int


@dataclass(frozen=True)
class MinibatchUpdate:
    """One minibatch. M tokens in it."""

    epoch: int
    minibatch: int
    tokens: Tensor  # [M] int64 index into the [N] fields
    policy: PolicyUpdate | None  # None where its epochs are over or it rests after too much KL
    value: ValueUpdate | None  # None where its epochs are over or there is no value model
    policy_digest: str  # weights after the step
    value_digest: str | None  # None without a value model


@dataclass(frozen=True)
class Iteration:
    """Everything one iteration produced."""

    index: int
    evaluation: Evaluation | None  # None where not due
    coefficients: Coefficients  # those in force during this iteration
    rollout: Rollout
    forward: ForwardPass
    rewards: Rewards
    advantages: Advantages
    updates: tuple[MinibatchUpdate, ...]
    seconds: dict[str, float]  # wall time by phase: rollout, forward, update, evaluation


@dataclass(frozen=True)
class Evaluation:
    """Greedy decoding of the held-out prompts."""

    accuracy: float
    score: float


@dataclass(frozen=True)
class ReturnStatistics:
    """Mean and spread of all returns so far: Chan et al.'s update, each iteration's sums correctly rounded."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    @property
    def scale(self) -> float:
        """Population standard deviation, at least 1e-4; 1 before there are returns."""
        return max(math.sqrt(self.squares / self.count), 1e-4) if self.count else 1.0

    def joined(self, returns: Sequence[float]) -> ReturnStatistics:
        """These and further returns together."""
        new = len(returns)
        total = self.count + new
        mean = math.fsum(returns) / new
        squares = math.fsum((x - mean) * (x - mean) for x in returns)
        step = mean - self.mean
        return ReturnStatistics(
            total,
            self.mean + step * (new / total),
            self.squares + squares + step * step * (self.count * (new / total)),
        )


@dataclass(frozen=True)
class Coefficients:
    """What moves between iterations beside weights; a coefficient that the configuration lacks is 0."""

    kl_coef: float
    clip_range: float
    penalty_coef: float
    returns: ReturnStatistics  # in whose units values are predicted; count 0 where they are not
