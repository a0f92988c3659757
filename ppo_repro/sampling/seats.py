"""Compute logits for requests in seats.

A seat is the part of the cache with the keys and values of one sequence. A request stays in its seat until its
completion ends. Keys and values stay until the next request takes the seat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.numerics.families import mixture_layers, trunk_of
from ppo_repro.numerics.interface import ints
from ppo_repro.numerics.network import logits, network_of
from ppo_repro.numerics.sequences import index, ragged
from ppo_repro.sampler import Request


def _keys(tokens: Sequence[int]) -> list[int]:
    """Return a hash of every prefix, shortest first. Equal prefixes have equal hashes."""
    return list(accumulate(tokens, lambda key, token: hash((key, token)), initial=0))[1:]


class PrefixIndex:
    """The tokens in each seat; finds the seat with the longest prefix of a prompt."""

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._seats: dict[int, int] = {}  # key of a prefix -> the seat last known to hold it

    def note(self, seat: int, tokens: Sequence[int]) -> None:
        """Note that `seat` now has the keys and values of exactly these tokens."""
        for key in _keys(self._tokens.get(seat, ())):
            if self._seats.get(key) == seat:
                del self._seats[key]
        self._tokens[seat] = tuple(tokens)
        for key in _keys(tokens):
            self._seats[key] = seat

    def longest(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Find (seat, number of tokens) of the longest prefix of `prompt` in any seat; (0, 0) if there is none."""
        keys = _keys(prompt)
        for length in range(len(keys), 0, -1):
            seat = self._seats.get(keys[length - 1])
            # compare the tokens: the seat may have other tokens by now, and two prefixes may have the same key
            if seat is not None and self._tokens[seat][:length] == tuple(prompt[:length]):
                return seat, length
        return 0, 0


class Sampled(NamedTuple):
    """A sampled token: one row of a `draw.DrawnTokens`. NumPy numbers are read faster than tensors."""

    token: int
    logprob: np.float32
    log_kept_mass: np.float32
    kept_tokens: np.ndarray


@dataclass(eq=False)
class Seated:
    """A request in a seat, and its completion so far.

    A request is new until its first token is sampled. It is answered while the policy has not read the environment's
    last reply.
    """

    index: int
    request: Request
    seat: int
    computed: int = 0  # number of the first tokens of `context` whose keys and values are in the seat
    tokens: list[int] = field(default_factory=list)  # after the prompt, the environment's tokens included
    is_forced: list[bool] = field(default_factory=list)  # which of `tokens` the environment put in
    sampled: list[Sampled] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=lambda: [[]])  # the sampled tokens of each turn

    @property
    def context(self) -> tuple[int, ...]:
        """Return all tokens, prompt first."""
        return (*self.request.prompt_ids, *self.tokens)

    @property
    def last_position(self) -> int:
        """Return the position of the last token."""
        return len(self.request.prompt_ids) + len(self.tokens) - 1

    @property
    def is_new(self) -> bool:
        return not self.tokens

    @property
    def is_answered(self) -> bool:
        return bool(self.is_forced) and self.is_forced[-1]

    def add(self, sampled: Sampled) -> None:
        """Append a sampled token."""
        self.tokens.append(sampled.token)
        self.is_forced.append(False)
        self.turns[-1].append(sampled.token)
        self.sampled.append(sampled)

    def put_in(self, reply: Sequence[int]) -> None:
        """Append the environment's tokens, and begin the next turn."""
        self.tokens += reply
        self.is_forced += [True] * len(reply)
        self.turns.append([])


class Seats:
    """Keys and values of a policy in seats; in deterministic numerics logits depend on one request alone."""

    def __init__(
        self,
        policy: PreTrainedModel,
        count: int,
        max_context: int,
        prefill_chunk: int,
        prefix_cache: bool,
        routes: bool,
    ) -> None:
        """Make empty seats.

        Args:
            policy: in deterministic or native numerics; its weights may not change any more.
            max_context: tokens of a seat.
            prefill_chunk: tokens of a prompt in one pass, 0 for all.
            routes: whether to note the experts of each token.
        """
        self._policy, self._prefix_cache = policy, prefix_cache
        self._prefill_chunk = prefill_chunk or max_context
        self._network = network_of(trunk_of(policy))
        self._network.prepare()
        self._cache = self._network.make_cache(count, max_context)
        self._prefixes = PrefixIndex()
        # the experts that computed the token at each position of each seat, [count, max_context, M k]
        width = len(mixture_layers(policy)) * int(policy.config.num_experts_per_tok) if routes else 0
        self._routes = torch.zeros(count, max_context, width, dtype=torch.int32) if routes else None

    def logits_after(self, batch: list[Seated]) -> Tensor:
        """Return the logits [len(batch), V] after requests that are all new, all answered, or all neither."""
        first = batch[0]
        if not first.is_new and not first.is_answered:
            return logits(self._policy, self._forward(batch, [(item.tokens[-1],) for item in batch]))
        if not self._prefix_cache:
            for item in batch:
                item.computed = 0
        rows = self._prefill_prompts(batch) if first.is_new and self._prefix_cache else self._prefill(batch)
        return torch.stack([rows[item] for item in batch])

    def release(self, item: Seated) -> Tensor | None:
        """Free the seat of a finished request; return the request's routes, if they were noted."""
        self._prefixes.note(item.seat, item.context[:-1])
        return None if self._routes is None else self._routes[item.seat, : item.last_position].clone()

    def _prefill_prompts(self, batch: list[Seated]) -> dict[Seated, Tensor]:
        """Copy the prefixes of prompts from other seats, compute the rest, and return the logits [V] after each prompt.

        If several prompts are equal, the first one is computed first, and the others copy its keys and values. In
        native numerics bits depend on the seat from which a prefix is copied, so the order of copies must stay.
        """
        firsts: dict[tuple[int, ...], Seated] = {}
        equal: list[Seated] = []
        for item in batch:
            if item.request.prompt_ids in firsts:
                equal.append(item)
            else:
                firsts[item.request.prompt_ids] = item
                self._take_over(item)
            self._prefixes.note(item.seat, ())
        rows = self._prefill_and_note(list(firsts.values()))
        for item in equal:
            self._take_over(item)
        return rows | self._prefill_and_note(equal)

    def _prefill_and_note(self, items: list[Seated]) -> dict[Seated, Tensor]:
        rows = self._prefill(items)
        for item in items:
            self._prefixes.note(item.seat, item.request.prompt_ids)
        return rows

    def _take_over(self, item: Seated) -> None:
        """Copy the longest prefix that a seat has. The last prompt token is always computed, for its logits."""
        source, item.computed = self._prefixes.longest(item.request.prompt_ids[:-1])
        if item.computed and source != item.seat:
            self._network.copy_prefix(self._cache, source, item.seat, item.computed)
            if self._routes is not None:
                self._routes[item.seat, : item.computed] = self._routes[source, : item.computed]

    def _prefill(self, items: list[Seated]) -> dict[Seated, Tensor]:
        """Compute the rest of each context, `prefill_chunk` tokens at a time; return the logits [V] after each one."""
        rows: dict[Seated, Tensor] = {}
        while items:
            chunks = [item.context[item.computed : item.computed + self._prefill_chunk] for item in items]
            hidden = self._forward(items, chunks)
            ends = [row for row, item in enumerate(items) if item.computed == len(item.context)]
            if ends:
                of_ends = logits(self._policy, hidden[torch.tensor(ends).to(hidden.device)])
                rows.update(zip((items[row] for row in ends), of_ends, strict=True))
            items = [item for item in items if item.computed < len(item.context)]
        return rows

    def _forward(self, items: list[Seated], chunks: Sequence[tuple[int, ...]]) -> Tensor:
        """Compute the next tokens of each request, and return the hidden states [R, H] of the last token of each."""
        batch, seats = ragged(chunks, past=[item.computed for item in items]), [item.seat for item in items]
        hidden, routes = self._network.over_cache(batch, self._cache, seats, seen=self._routes is not None)
        if self._routes is not None:
            of_tokens = index(ints(seats)[batch.rows.sequence]), index(batch.rows.position)
            self._routes[of_tokens] = torch.from_numpy(routes)
        for item, chunk in zip(items, chunks, strict=True):
            item.computed += len(chunk)
        return hidden if len(hidden) == len(chunks) else hidden[index(batch.start[1:] - 1).to(hidden.device)]
