"""The sequences in progress: what of them is in which seat of the cache, and the logits after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.engine import Request
from ppo_repro.numerics.families import mixture_layers, trunk_of
from ppo_repro.numerics.interface import ints
from ppo_repro.numerics.network import logits, network_of
from ppo_repro.numerics.sequences import index, ragged

_NO_TOKEN = -1


class PrefixIndex:
    """The tokens whose keys and values are in each seat."""

    def __init__(self, seats: int, max_context: int) -> None:
        self._tokens = np.full((seats, max_context), _NO_TOKEN, np.int32)

    def note(self, seat: int, tokens: Sequence[int]) -> None:
        """Note that `seat` now has the keys and values of exactly these tokens."""
        self._tokens[seat, : len(tokens)] = tokens
        self._tokens[seat, len(tokens) :] = _NO_TOKEN

    def longest(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Find (seat, number of tokens) of the longest prefix of `prompt` in any seat; the number may be 0."""
        same = self._tokens[:, : len(prompt)] == np.array(prompt, np.int32)
        lengths = np.logical_and.accumulate(same, axis=1).sum(1)
        seat = int(lengths.argmax())
        return seat, int(lengths[seat])


class Drawn(NamedTuple):
    """The numbers of one sampled token."""

    logprob: float
    log_kept_mass: float
    kept_tokens: np.ndarray  # [ceil(V/8)] uint8 or [0]


@dataclass(eq=False)
class Seated:
    """A request in a seat, and its tokens so far."""

    index: int
    request: Request
    seat: int
    known: int = 0  # the first tokens, whose keys and values are in the seat when a prefill begins
    tokens: list[int] = field(default_factory=list)  # after the prompt: sampled, and put in by a dialogue
    drawn: list[Drawn] = field(default_factory=list)  # of the sampled ones
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

    def add(self, token: int, drawn: Drawn) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        self.forced.append(False)
        self.turns[-1].append(token)
        self.drawn.append(drawn)

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
        """Make empty seats for a policy whose weights may not change any more.

        Args:
            max_context: tokens of a seat.
            prefill_chunk: tokens of a prompt in one pass.
            routes: whether to note the experts of each token.
        """
        self._policy, self._prefill_chunk, self._prefix_cache = policy, prefill_chunk, prefix_cache
        self._network: Any = network_of(trunk_of(policy))
        self._network.prepare()
        self._cache = self._network.make_cache(count, max_context)
        self._prefixes = PrefixIndex(count, max_context)
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

        Equal prompts come after the first of them, which they copy.
        """
        firsts: dict[tuple[int, ...], Seated] = {}
        for item in turn:
            firsts.setdefault(item.request.prompt_ids, item)
        equal = [item for item in turn if item is not firsts[item.request.prompt_ids]]
        found: dict[Seated, Tensor] = {}
        for items in (list(firsts.values()), equal):
            for item in items:
                self._take_over(item)
            found |= self._prefill(items)
            for item in items:
                self._prefixes.note(item.seat, item.request.prompt_ids)
        return found

    def _take_over(self, item: Seated) -> None:
        """Copy the longest prefix that a seat has; the last prompt token is always computed, for its logits."""
        source, item.known = self._prefixes.longest(item.request.prompt_ids[:-1])
        if item.known and source != item.seat:
            self._network.copy_prefix(self._cache, source, item.seat, item.known)
            if self._routes is not None:
                self._routes[item.seat, : item.known] = self._routes[source, : item.known]
        self._prefixes.note(item.seat, item.request.prompt_ids[: item.known])

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
