"""The sequences in progress: what of them is in which seat of the cache, and the logits after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.engine import Request
from ppo_repro.numerics.families import mixture_layers, trunk_of
from ppo_repro.numerics.interface import ints
from ppo_repro.numerics.network import logits, network_of
from ppo_repro.numerics.sequences import index, ragged


def _keys(tokens: Sequence[int]) -> list[int]:
    """Return a hash of every prefix, shortest first; equal prefixes have equal hashes."""
    return list(accumulate(tokens, lambda key, token: hash((key, token)), initial=0))[1:]


class PrefixIndex:
    """The tokens whose keys and values are in each seat."""

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
            # the seat may hold other tokens by now, and two prefixes may have the same key
            if seat is not None and self._tokens[seat][:length] == tuple(prompt[:length]):
                return seat, length
        return 0, 0


@dataclass(frozen=True)
class Drawn:
    """A `Sample` as NumPy arrays, which read single numbers faster than tensors."""

    logprobs: np.ndarray
    log_kept_mass: np.ndarray
    kept_tokens: np.ndarray


@dataclass(eq=False)
class Seated:
    """A request in a seat, and its tokens so far."""

    index: int
    request: Request
    seat: int
    known: int = 0  # the first tokens, whose keys and values are in the seat when a prefill begins
    tokens: list[int] = field(default_factory=list)  # after the prompt: sampled, and put in by a dialogue
    samples: list[tuple[Drawn, int]] = field(default_factory=list)  # of the sampled ones
    turns: list[list[int]] = field(default_factory=lambda: [[]])  # the sampled ones by turn
    forced: list[bool] = field(default_factory=list)

    @property
    def context(self) -> tuple[int, ...]:
        """Return all tokens, prompt first."""
        return (*self.request.prompt_ids, *self.tokens)

    @property
    def last_position(self) -> int:
        """Return the position of the last token."""
        return len(self.request.prompt_ids) + len(self.tokens) - 1

    @property
    def is_answered(self) -> bool:
        """Return whether the environment has spoken and the model has not read it."""
        return bool(self.forced) and self.forced[-1]

    def add(self, token: int, drawn: Drawn, row: int) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        self.forced.append(False)
        self.turns[-1].append(token)
        self.samples.append((drawn, row))

    def put_in(self, tokens: Sequence[int]) -> None:
        """Append tokens that the environment wrote and the policy did not sample, and begin another turn after them."""
        self.known = self.last_position
        self.tokens += tokens
        self.forced += [True] * len(tokens)
        self.turns.append([])


class Seats:
    """Keys and values of a policy's sequences; computes what a seat lacks, whatever else is computed with it."""

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
            prefill_chunk: tokens of a prompt in one pass.
            routes: whether to note the experts of each token.
        """
        self._policy, self._prefill_chunk, self._prefix_cache = policy, prefill_chunk, prefix_cache
        self._network: Any = network_of(trunk_of(policy))
        self._network.prepare()
        self._cache = self._network.make_cache(count, max_context)
        self._prefixes = PrefixIndex()
        # the experts that computed the token at each position of each seat, [count, max_context, M k]
        width = len(mixture_layers(policy)) * int(policy.config.num_experts_per_tok) if routes else 0
        self._routes = torch.zeros(count, max_context, width, dtype=torch.int32) if routes else None

    def logits_after(self, turn: list[Seated]) -> Tensor:
        """Return the logits [len(turn), V] after sequences that are all new, all answered, or all to be decoded."""
        if turn[0].tokens and not turn[0].is_answered:
            return self._decode(turn)
        if not self._prefix_cache:
            for item in turn:
                item.known = 0
        takes_prefixes = self._prefix_cache and not turn[0].is_answered
        rows = self._prefill_prompts(turn) if takes_prefixes else self._prefill(turn)
        return torch.stack([rows[item] for item in turn])

    def release(self, item: Seated) -> Tensor | None:
        """Leave the seat of a finished sequence to another one; return the sequence's routes, if they were noted."""
        self._prefixes.note(item.seat, item.context[:-1])
        return None if self._routes is None else self._routes[item.seat, : item.last_position].clone()

    def _prefill_prompts(self, turn: list[Seated]) -> dict[Seated, Tensor]:
        """Compute the unknown tokens of the prompts, and return the logits [V] after each prompt.

        Equal prompts come after the first of them, whose keys and values they copy. In native numerics bits depend on
        the seat that a prefix is copied from, so the order of copies stays.
        """
        firsts: dict[tuple[int, ...], Seated] = {}
        equal: list[Seated] = []
        for item in turn:
            if item.request.prompt_ids in firsts:
                equal.append(item)
            else:
                firsts[item.request.prompt_ids] = item
                self._take_over(item)
            self._prefixes.note(item.seat, ())
        found = self._prefill_and_note(list(firsts.values()))
        for item in equal:
            self._take_over(item)
        return found | self._prefill_and_note(equal)

    def _prefill_and_note(self, items: list[Seated]) -> dict[Seated, Tensor]:
        rows = self._prefill(items)
        for item in items:
            self._prefixes.note(item.seat, item.request.prompt_ids)
        return rows

    def _take_over(self, item: Seated) -> None:
        """Copy the longest prefix that a seat has; the last prompt token is always computed, for its logits."""
        source, item.known = self._prefixes.longest(item.request.prompt_ids[:-1])
        if item.known and source != item.seat:
            self._network.copy_prefix(self._cache, source, item.seat, item.known)
            if self._routes is not None:
                self._routes[item.seat, : item.known] = self._routes[source, : item.known]

    def _prefill(self, items: list[Seated]) -> dict[Seated, Tensor]:
        """Compute `prefill_chunk` tokens of each context at a time, and return the logits [V] after each context."""
        rows: dict[Seated, Tensor] = {}
        while items:
            pieces = [item.context[item.known : item.known + self._prefill_chunk] for item in items]
            hidden = self._forward(items, pieces, [item.known for item in items])
            for item, piece in zip(items, pieces, strict=True):
                item.known += len(piece)
            ends = [row for row, item in enumerate(items) if item.known == len(item.context)]
            if ends:
                found = logits(self._policy, hidden[torch.tensor(ends).to(hidden.device)])
                rows.update(zip((items[row] for row in ends), found, strict=True))
            items = [item for item in items if item.known < len(item.context)]
        return rows

    def _decode(self, turn: list[Seated]) -> Tensor:
        """Compute the last token of each response, and return the logits [len(turn), V] after it."""
        pieces = [(item.tokens[-1],) for item in turn]
        return logits(self._policy, self._forward(turn, pieces, [item.last_position for item in turn]))

    def _forward(self, items: list[Seated], pieces: Sequence[tuple[int, ...]], starts: list[int]) -> Tensor:
        """Compute the hidden states [R, H] of the last token of each piece, which begins at position starts[r]."""
        batch, seats = ragged(pieces, past=starts), [item.seat for item in items]
        hidden, routes = self._network.over_cache(batch, self._cache, seats, seen=self._routes is not None)
        if self._routes is not None:
            of_tokens = index(ints(seats)[batch.rows.sequence]), index(batch.rows.position)
            self._routes[of_tokens] = torch.from_numpy(routes)
        return hidden if len(hidden) == len(pieces) else hidden[index(batch.start[1:] - 1).to(hidden.device)]
