"""One frozen type per stage of an iteration. A value of a type exists only once its stage has run.

Letters: B sequences (responses), N response tokens of all sequences one after the other without padding, V vocabulary.
Log-probabilities and entropies are in nats. The comment of a field says when it is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompts:
    """The prompts of one iteration, one entry per response to sample."""

    prompt_key: tuple[str, ...]  # [B] stable name of the prompt in its task
    sample_index: tuple[int, ...]  # [B] number of the sample among the samples of its prompt
    seed: tuple[int, ...]  # [B] sampler seed of the response
    prompt: tuple[str, ...]  # [B] text
    answer: tuple[str, ...]  # [B] what the verifier expects
    prompt_ids: tuple[tuple[int, ...], ...]  # [B] ragged


@dataclass(frozen=True)
class Spans:
    """The place of each token in the text of a response; `char_start[t] == char_end[t]` for a token without text."""

    char_start: list[int]
    char_end: list[int]
    byte_start: list[int]
    byte_end: list[int]
    word_id: list[int]
    sub_idx: list[int]


@dataclass(frozen=True)
class Episode:
    """The turns of model and environment after a prompt. The last token is sampled."""

    ids: tuple[int, ...]  # sampled tokens and the environment's tokens, in order
    is_forced: tuple[bool, ...]  # which ones the environment put in
    turns: tuple[str, ...]  # the texts, the model's first; empty where they come from records


@dataclass(frozen=True)
class Rollout:
    """The sampled responses. A token's log-prob is its log-prob in the distribution from which it was drawn.

    The N tokens are the sampled ones. Tokens that the environment puts in are in `episodes`, and have no row in any
    table.
    """

    prompts: Prompts
    response_ids: Tensor  # [N] int64
    lengths: Tensor  # [B] int64, at least 1 each, sum N
    temperature: float  # that logits are divided by
    rollout_logprobs: Tensor  # [N] float32, temperature and top-k/top-p included
    log_kept_mass: Tensor  # [N] float32, log of the probability mass that top-k/top-p keep; 0 without them
    kept_tokens: Tensor  # [N, ceil(V/8)] uint8 bit set of eligible tokens; [N, 0] without top-k and top-p
    finish_reason: tuple[str, ...]  # [B] "stop" or "length"
    server: tuple[str | None, ...]  # [B] URL of the SGLang server; None for the built-in engine
    latency: tuple[float | None, ...]  # [B] seconds from the server's receipt of the request to its last token
    response: tuple[str, ...]  # [B] decoded text without special tokens, of whole episodes
    spans: tuple[Spans, ...]  # [B]
    episodes: tuple[Episode, ...] | None = None  # [B]; None where every episode is one turn
    rollout_policy_versions: tuple[tuple[int, ...], ...] | None = None  # [B] ragged, of each token; None without a lag
    sampled_ids: tuple[tuple[int, ...], ...] | None = None  # [B] ragged; None if they are response_ids
    is_as_sampled: tuple[tuple[bool, ...], ...] | None = None  # [B] ragged, of each token; None if sampled_ids is None
    # None unless `records.level` is `deep` or `ppo.replay_routes` is true
    routes: tuple[Tensor, ...] | None = None  # [B] int32 [inputs, M k], see `token_routes`
    in_losses: Tensor | None = None  # [N] bool, the tokens that have a loss; None: all

    def whole(self, sequence: int) -> tuple[int, ...]:
        """Return all tokens of a sequence after its prompt, the environment's tokens included."""
        if self.episodes is not None:
            return self.episodes[sequence].ids
        start = int(self.lengths[:sequence].sum())
        return tuple(self.response_ids[start : start + int(self.lengths[sequence])].tolist())

    def sampled(self) -> list[list[int]]:
        """Return the sampled tokens of each sequence, [B]."""
        return [ids.tolist() for ids in self.response_ids.split(self.lengths.tolist())]

    def token_routes(self) -> Tensor:
        """Return the experts of the inputs that predict the tokens, [N, M k] int32: k of each of M layers, ascending.

        The inputs are all tokens of a sequence except the last. The shape is [N, 0] if no routes are known.
        """
        if self.routes is None:
            return torch.empty(len(self.response_ids), 0, dtype=torch.int32)
        rows = []
        for sequence, routes in enumerate(self.routes):
            predicting = routes[len(routes) - len(self.whole(sequence)) :]
            if self.episodes is not None:
                predicting = predicting[~torch.tensor(self.episodes[sequence].is_forced)]
            rows.append(predicting)
        return torch.cat(rows)

    def starts(self) -> Tensor:
        """Return the index of each sequence's first token in the [N] fields, [B] int64."""
        return torch.cumsum(self.lengths, 0) - self.lengths

    def sequence_of_token(self) -> Tensor:
        """Return the sequence that each token belongs to, [N] int64."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    def groups(self) -> Tensor:
        """Return the prompt of each sequence, numbered within the iteration, [B] int64."""
        numbers = {key: number for number, key in enumerate(dict.fromkeys(self.prompts.prompt_key))}
        return torch.tensor([numbers[key] for key in self.prompts.prompt_key], dtype=torch.int64)

    def about_tokens(self) -> dict[str, Tensor]:
        """Return the fields of `ppo.own_batches.Tokens` for all tokens, [N] int64 each."""
        responses, starts = self.sequence_of_token(), self.starts()
        return {
            "responses": responses,
            "groups": self.groups()[responses],
            "positions": torch.arange(len(responses)) - starts[responses],
            "lengths": self.lengths[responses],
        }

    def word_ids(self) -> Tensor:
        """Return the word of each token, counted within its response, [N] int64."""
        return torch.tensor([word for spans in self.spans for word in spans.word_id], dtype=torch.int64)

    def tokens_of(self, sequences: Tensor) -> Tensor:
        """Return the indices into the [N] fields of the tokens of `sequences`, in the given order."""
        starts = self.starts()
        return torch.cat([torch.arange(int(starts[s]), int(starts[s] + self.lengths[s])) for s in sequences])


@dataclass(frozen=True)
class ForwardPass:
    """The trainer's forward pass of policy, reference and value model before any update."""

    old_logprobs: Tensor  # [N] float32
    ref_logprobs: Tensor  # [N] float32
    ref_kl: Tensor  # [N] float32, KL(policy || reference) over the whole distribution at that position
    reverse_ref_kl: Tensor | None  # [N] float32, KL(reference || policy); None unless the reward charges it
    entropies: Tensor  # [N] float32
    prob_sq_sums: Tensor  # [N] float32, sum over the vocabulary of the squared probabilities
    # [N] float32, of the tokens at least as likely, itself included; None: not recorded
    cumulative_probs: Tensor | None
    routes: Tensor  # [N, M k] int32, of the policy, as `Rollout.token_routes`; [N, 0] below level deep
    values: Tensor | None  # [N] float32, expected return before the token; None without a value model


@dataclass(frozen=True)
class Rewards:
    """Scores of responses, and rewards of tokens after placement, KL penalty and whitening."""

    scores: Tensor  # [B] float64
    score_parts: tuple[tuple[float, ...], ...]  # [B] unweighted value of every reward term
    is_correct: Tensor  # [B] bool, right by the verifier, or equal to the answer, and ended with an end token
    kl_penalties: Tensor  # [N] float32, kl_coef times the KL estimate on the charged token; 0 if no reward has it
    placed_scores: Tensor  # [N] float64, the scores on their tokens
    raw_rewards: Tensor  # [N] float32, placed_scores - kl_penalties
    rewards: Tensor  # [N] float32, whitened if configured: the input of the advantages


@dataclass(frozen=True)
class Advantages:
    """Advantages and the value targets."""

    raw_advantages: Tensor  # [N] float32
    advantages: Tensor  # [N] float32, whitened if configured
    returns: Tensor | None  # [N] float32, raw_advantages + values; None without a value model


@dataclass(frozen=True)
class PolicyUpdate:
    """One optimizer step of the policy on the M tokens of a minibatch, and its losses before the step."""

    new_logprobs: Tensor  # [M] float32
    ratios: Tensor  # [M] float32, exp(new_logprobs - anchor)
    clip_flags: Tensor  # [M] uint8, a ppo.objectives.ClipFlag each
    new_entropies: Tensor  # [M] float32
    losses: Tensor  # [M] float32, all terms
    surrogates: Tensor  # [M] float32, the objective's term in ratio and advantage
    penalty_terms: Tensor | None  # [M] float32, of PPO-Penalty; None for other objectives
    importance_weights: Tensor | None  # [M] float32, factor on the two terms above; None unless configured
    corrections: Tensor | None  # [M] uint8, a ppo.corrections.Correction each; None unless configured
    kl_terms: Tensor | None  # [M] float32, kl_coef times the KL to the reference; None unless the loss has it
    loss: float  # all terms, weighted as configured
    surrogate_loss: float  # weighted sum of the surrogates alone, with importance weights
    penalty_loss: float | None
    entropy_loss: float
    kl_loss: float | None
    entropy: float  # token mean
    approx_kl: float  # KL(anchor || new), k3, token mean
    clip_fraction: float | None  # share of tokens whose policy gradient the clip removed; None if that is unknown
    grad_norm: float


@dataclass(frozen=True)
class ValueUpdate:
    """One optimizer step of the value model, and its losses before the step."""

    new_values: Tensor  # [M] float32
    clipped: Tensor  # [M] bool, the clipped branch decided the value loss
    losses: Tensor  # [M] float32, before value_coef
    loss: float
    clip_fraction: float
    grad_norm: float | None  # None where the value head shares the policy's step


@dataclass(frozen=True, kw_only=True)
class MinibatchUpdate:
    """The optimizer steps of policy and value model on a minibatch of M tokens."""

    epoch: int
    minibatch: int
    tokens: Tensor  # [M] int64 index into the [N] fields
    loss_weights: Tensor  # [M] float32, of each token's losses in the losses of the step
    policy: PolicyUpdate | None  # None where its epochs are over, or after an early stop
    value: ValueUpdate | None  # None where its epochs are over or there is no value model


@dataclass(frozen=True)
class WeightDigests:
    """The digests of the weights after the optimizer steps on a minibatch."""

    policy_digest: str
    value_digest: str | None  # None without a value model


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The results of all stages of one iteration."""

    index: int
    evaluation: Evaluation | None  # None in iterations without one
    coefficients: Coefficients  # used in this iteration
    rollout: Rollout
    forward: ForwardPass
    rewards: Rewards
    advantages: Advantages
    updates: tuple[MinibatchUpdate, ...]
    digests: tuple[WeightDigests, ...]  # after each of the updates
    seconds: dict[str, float]  # wall time by phase: evaluation, rollout, forward, update, digests, other


@dataclass(frozen=True)
class Evaluation:
    """Greedy responses to the E held-out prompts, and their scores."""

    prompt_key: tuple[str, ...]  # [E] stable name of the prompt in its task
    prompt: tuple[str, ...]  # [E] text
    answer: tuple[str, ...]  # [E] what the verifier expects
    prompt_ids: tuple[tuple[int, ...], ...]  # [E] ragged
    response_ids: tuple[tuple[int, ...], ...]  # [E] ragged, end tokens included
    response: tuple[str, ...]  # [E] decoded text without special tokens
    finish_reason: tuple[str, ...]  # [E] "stop" or "length"
    scores: tuple[float, ...]  # [E]
    score_parts: tuple[tuple[float, ...], ...]  # [E] unweighted value of every reward term
    is_correct: tuple[bool, ...]  # [E]
    episodes: tuple[Episode, ...] | None = None  # [E]; None where every episode is one turn

    @property
    def accuracy(self) -> float:
        """Return the share of correct responses."""
        return sum(self.is_correct) / len(self.is_correct)

    @property
    def score(self) -> float:
        """Return the mean score."""
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True)
class ReturnStatistics:
    """Mean and spread of all returns so far. Sums over an iteration are correctly rounded."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    @property
    def scale(self) -> float:
        """Return the population standard deviation, at least 1e-4; 1 if there are no returns yet."""
        return max(math.sqrt(self.squares / self.count), 1e-4) if self.count else 1.0

    def joined(self, returns: Sequence[float]) -> ReturnStatistics:
        """Return the statistics of these and new returns, of which there must be at least one.

        With n old and m new returns and d the new mean minus the old mean, mean' = mean + d m / (n + m) and squares' =
        squares + new squares + d^2 n m / (n + m). Chan, Golub and LeVeque, 1983.
        """
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
    """Values besides the weights that change between iterations. A coefficient that the configuration lacks is 0."""

    kl_coef: float
    clip_range: float
    penalty_coef: float
    returns: ReturnStatistics  # the value model predicts in their units; count 0 without normalised returns


@dataclass(frozen=True)
class WarmStartStep:
    """The record of one supervised step."""

    epoch: int
    examples: int
    tokens: int  # of the answers, end tokens included
    loss: float  # before the step, nats, token mean
    learning_rate: float
    grad_norm: float
    accuracy: float | None  # greedy, after the step; None where it was not measured
