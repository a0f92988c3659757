"""The requests that the loop sends to a sampler, and the completions that the sampler returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ppo_repro.base.errors import UserError


class TooLongError(UserError):
    """A prompt leaves no room for a response in the context."""


@dataclass(frozen=True)
class Sampling:
    """The distribution to sample from: softmax(logits / temperature), cut by top-k and top-p, renormalised.

    The code that uses a value refuses it if it is out of range.

    Source: Fan et al., 2018, https://arxiv.org/abs/1805.04833 (top-k); Holtzman et al., 2020,
    https://arxiv.org/abs/1904.09751 (top-p).
    """

    temperature: float = 1.0  # above 0
    top_k: int = 0  # keeps the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keeps the likeliest tokens that together reach this mass; 1 keeps all
    max_response_tokens: int = 64  # the end token included
    greedy: bool = False  # takes the likeliest token; its log-prob still follows from the other fields
    routes: bool = False  # whether to return the routes through a mixture of experts; changes no token

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0


class Dialogue(Protocol):
    """The environment of one episode of several turns: it may end a turn of the model, and it replies."""

    def ends(self, turn: Sequence[int]) -> bool:
        """Return whether the tokens of a turn so far end it, even if the last one is no end token."""
        ...

    def reply(self, turns: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """Return the environment's tokens after the model's `turns`; None if the episode is over."""
        ...


@dataclass(frozen=True)
class Request:
    """The request for one response. Samplers take and return token ids, never text.

    Without a dialogue, an end token ends the completion. With a dialogue, the tokens of its reply are added as they
    are, and sampling continues after them while there are fewer than `max_response_tokens`. A reply that leaves no room
    for another token is not added, and ends the completion as the limit does.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    dialogue: Dialogue | None = None  # only the built-in sampler gets one: a configuration refuses it for others


@dataclass(frozen=True)
class EncodedAgain:
    """The sampler's part of a response whose text was encoded again, so that `response_ids` has new tokens."""

    text: str  # of the sampled tokens
    sampled_ids: tuple[int, ...]
    is_as_sampled: tuple[bool, ...]  # [T]


@dataclass(frozen=True)
class Completion:
    """A sampler's response to one request, of T sampled tokens.

    `stages.rollout.roll_out` joins the completions of an iteration to a `buffers.Rollout`, which describes the fields.
    """

    response_ids: tuple[int, ...]  # [T], the end token included
    logprobs: Tensor  # [T] float32
    log_kept_mass: Tensor  # [T] float32
    kept_tokens: Tensor  # [T, ceil(V/8)] uint8, or [T, 0]
    finish_reason: str  # "stop" or "length"
    server: str | None = None  # and the next: None unless a server sampled
    latency: float | None = None
    episode_ids: tuple[int, ...] = ()  # with a dialogue: all tokens after the prompt
    is_forced: tuple[bool, ...] = ()  # which of them the dialogue added
    routes: Tensor | None = None  # [inputs, M k] int32 of prompt and response; None if not requested
    policy_versions: tuple[int, ...] | None = None  # [T], of each token; None for a sampler that is never behind
    encoded_again: EncodedAgain | None = None

    @classmethod
    def uncut(cls, ids: Sequence[int], logprobs: Sequence[float], finish_reason: str) -> Completion:
        """Return a completion whose distribution top-k and top-p did not cut, from T tokens and log-probs in nats."""
        return cls(
            response_ids=tuple(ids),
            logprobs=torch.tensor(logprobs, dtype=torch.float32),
            log_kept_mass=torch.zeros(len(ids)),
            kept_tokens=torch.empty(len(ids), 0, dtype=torch.uint8),
            finish_reason=finish_reason,
        )


class Sampler(Protocol):
    """Samples responses with the present policy. Every sampler of a run has this interface."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Sample one completion for each request, in their order. Raises UserError for a request that cannot be served.

        All processes of a run call this method together, even a process without requests.
        """
        ...


def check_request(request: Request, sampling: Sampling, vocab_size: int, max_context: int) -> None:
    """Raise UserError for an empty prompt or a token outside the vocabulary, TooLongError for a long prompt.

    Args:
        request: the prompt.
        sampling: has the most tokens of a response.
        vocab_size: token ids are below it.
        max_context: tokens of prompt and response together.
    """
    ids = request.prompt_ids
    if not ids:
        raise UserError("empty prompt: a prompt needs at least one token")
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise UserError(
            f"prompt token id {outside[0]}: must be in 0..{vocab_size - 1}; "
            "check that tokenizer and model belong together"
        )
    if len(ids) + sampling.max_response_tokens > max_context:
        raise TooLongError(
            f"prompt of {len(ids)} tokens: with rollout.max_response_tokens = {sampling.max_response_tokens} "
            f"it exceeds numerics.max_context = {max_context}; shorten the prompt or raise the context"
        )
