"""The built-in engine: prefill and cached decoding of any number of requests in a few seats."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.mode import Mode
from ppo_repro.engine import Completion, Dialogue, Request, Sampling, check_request
from ppo_repro.numerics.families import routers, trunk_of
from ppo_repro.numerics.interface import Ints, ints
from ppo_repro.numerics.kernel_batch import Cache
from ppo_repro.numerics.native import NativeCache
from ppo_repro.numerics.network import logits, network_of
from ppo_repro.numerics.sequences import index, ragged
from ppo_repro.sampling.draw import sample


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


class CachedRoutes:
    """The experts that computed the token, and so the keys and values, at each position of each seat."""

    def __init__(self, seats: int, context: int) -> None:
        self._shape = seats, context
        self._routes: Tensor | None = None  # [seats, context, M k] int32, once the width is known

    def note(self, seats: Ints, positions: Ints, routes: Ints) -> None:
        """Store the routes [n, M k] of tokens at positions [n] of seats [n]."""
        if self._routes is None:
            self._routes = torch.zeros(*self._shape, routes.shape[-1], dtype=torch.int32)
        self._routes[index(seats), index(positions)] = torch.from_numpy(routes)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the routes of the first `length` tokens from seat `source` to seat `target`."""
        assert self._routes is not None
        self._routes[target, :length] = self._routes[source, :length]

    def of(self, seat: int, length: int) -> Tensor:
        """Return the routes of the first `length` tokens of a seat, [length, M k] int32."""
        assert self._routes is not None
        return self._routes[seat, :length].clone()


@dataclass(frozen=True)
class Drawn:
    """A `Sample` as NumPy arrays, which read single numbers faster than tensors."""

    logprobs: np.ndarray
    log_kept_mass: np.ndarray
    kept_tokens: np.ndarray


@dataclass
class _Active:
    """A request in a seat, and its tokens so far."""

    index: int
    request: Request
    seat: int
    known: int = 0  # tokens whose keys and values are in the seat when a prefill begins
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

    def add(self, token: int, drawn: Drawn, row: int) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        self.forced.append(False)
        self.turns[-1].append(token)
        self.samples.append((drawn, row))

    def put_in(self, tokens: Sequence[int]) -> None:
        """Append tokens that the environment wrote and the policy did not sample, and begin another turn after them."""
        self.tokens += tokens
        self.forced += [True] * len(tokens)
        self.turns.append([])


class TorchEngine:
    """Samples with the weights that a policy has at the call; keys and values do not outlive a call."""

    def __init__(
        self,
        policy: PreTrainedModel,
        stop_ids: frozenset[int],
        mode: Mode,
        max_context: int,
        seats: int,
        prefill_chunk: int,
        prefix_cache: bool = True,
        live: PreTrainedModel | None = None,
    ) -> None:
        """Make an engine for a policy whose weights may change between calls.

        Args:
            policy: in deterministic or native numerics.
            stop_ids: end tokens.
            mode: numerics, `deterministic` or `native`.
            max_context: tokens of the longest prompt and response together.
            seats: number of sequences at the same time.
            prefill_chunk: tokens of a prompt in one pass, 0 for all.
            prefix_cache: whether prompts reuse the keys and values of a shared prefix.
            live: a model of which `policy` is a copy in another dtype: before each call the policy takes the live
                weights, rounded. None: the policy itself is trained.
        """
        self.policy, self.stop_ids, self.mode = policy, stop_ids, mode
        self.max_context, self.seats = max_context, seats
        self.prefill_chunk = prefill_chunk or max_context
        self.prefix_cache = prefix_cache
        self.live = live
        self._network: Any = network_of(trunk_of(policy))  # of the generation in progress
        self._routes: CachedRoutes | None = None  # likewise

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        if self.live is not None:
            for name, parameter in self.policy.named_parameters():
                parameter.copy_(self.live.get_parameter(name))
        for request in requests:
            check_request(request, sampling, self.policy.config.vocab_size, self.max_context)
        seats = min(self.seats, len(requests))
        has_routes = sampling.routes and bool(routers(self.policy))
        self._routes = CachedRoutes(seats, self.max_context) if has_routes else None
        self._network = network_of(trunk_of(self.policy))
        self._network.prepare()
        cache = self._network.make_cache(seats, self.max_context)
        free = list(range(seats))
        prefixes = PrefixIndex()
        waiting = deque(enumerate(requests))
        active: list[_Active] = []
        answered: list[_Active] = []  # the environment has spoken, and the model has not read it
        done: dict[int, Completion] = {}
        while waiting or active or answered:
            if answered:
                turn, answered = answered, []
                logits_of = dict((item.index, row) for item, row in self._chunks(cache, turn))
                found = torch.stack([logits_of[item.index] for item in turn])
                active += turn
            elif waiting and free:
                turn = [_Active(*waiting.popleft(), free.pop()) for _ in range(min(len(free), len(waiting)))]
                found = self._prefill(cache, prefixes, turn)
                active += turn
            else:
                turn = active
                found = self._decode(cache, turn)
            self._sample(turn, found, sampling)
            for item in turn:
                reason = self._finish_reason(item, sampling, dialogue)
                if item.forced[-1]:
                    answered.append(item)
                elif reason:
                    done[item.index] = _completion(item, reason, self._routes)
                    free.append(item.seat)
                    prefixes.note(item.seat, item.context[:-1])
            active = [item for item in active if item.index not in done and not item.forced[-1]]
        return [done[index] for index in range(len(requests))]

    def _finish_reason(self, item: _Active, sampling: Sampling, dialogue: Dialogue | None) -> str:
        """Return why the completion ends; empty if it continues.

        The environment's reply is added if there is room for it.
        """
        at_limit = len(item.tokens) == sampling.max_response_tokens
        reason = "stop" if item.tokens[-1] in self.stop_ids else "length" if at_limit else ""
        if dialogue is None or (reason != "stop" and not dialogue.ends(item.turns[-1])):
            return reason
        reply = dialogue.reply(item.index, item.turns)
        if reply is None:
            return "stop"
        if len(item.tokens) + len(reply) >= sampling.max_response_tokens:
            return "length"
        # keys and values of all but the last token are in the seat
        item.known = item.last_position if self.prefix_cache else 0
        item.put_in(reply)
        return ""

    def _admit(self, cache: Cache | NativeCache, prefixes: PrefixIndex, turn: list[_Active]) -> list[list[_Active]]:
        """Copy known prefixes of the prompts into their seats; return the prompts to prefill, then copies of them."""
        leaders: dict[tuple[int, ...], _Active] = {}
        copies: list[_Active] = []
        for item in turn:
            prompt = item.request.prompt_ids
            if not self.prefix_cache:
                leaders[(*prompt, item.index)] = item
            elif prompt in leaders:
                copies.append(item)
            else:
                self._take_over(cache, prefixes, item)
                leaders[prompt] = item
            prefixes.note(item.seat, ())
        return [list(leaders.values()), copies] if copies else [list(leaders.values())]

    def _take_over(self, cache: Cache | NativeCache, prefixes: PrefixIndex, item: _Active) -> None:
        """Copy the longest prefix that a seat has; the last prompt token is always computed, for its logits."""
        source, item.known = prefixes.longest(item.request.prompt_ids[:-1])
        if item.known and source != item.seat:
            self._network.copy_prefix(cache, source, item.seat, item.known)
            if self._routes is not None:
                self._routes.copy_prefix(source, item.seat, item.known)

    def _prefill(self, cache: Cache | NativeCache, prefixes: PrefixIndex, turn: list[_Active]) -> Tensor:
        """Compute the unknown tokens of the prompts, and return the logits [len(turn), V] after each prompt."""
        row_of: dict[int, Tensor] = {}
        for wave, items in enumerate(self._admit(cache, prefixes, turn)):
            for item in items:
                if wave:  # a copy; its original is in the cache by now
                    self._take_over(cache, prefixes, item)
            for item, row in self._chunks(cache, items):
                row_of[item.index] = row
                prefixes.note(item.seat, item.request.prompt_ids)
        return torch.stack([row_of[item.index] for item in turn])

    def _chunks(self, cache: Cache | NativeCache, items: list[_Active]) -> Iterator[tuple[_Active, Tensor]]:
        """Prefill `prefill_chunk` tokens of each context at a time; yield the logits [V] of a context at its end."""
        while items:
            pieces = [item.context[item.known : item.known + self.prefill_chunk] for item in items]
            hidden = self._forward(cache, items, pieces, [item.known for item in items])
            for item, piece in zip(items, pieces, strict=True):
                item.known += len(piece)
            ends = [row for row, item in enumerate(items) if item.known == len(item.context)]
            if ends:
                found = logits(self.policy, hidden[torch.tensor(ends).to(hidden.device)])
                yield from zip((items[row] for row in ends), found, strict=True)
            items = [item for item in items if item.known < len(item.context)]

    def _decode(self, cache: Cache | NativeCache, turn: list[_Active]) -> Tensor:
        """Compute the last token of each response, and return the logits [len(turn), V] after it."""
        pieces = [(item.tokens[-1],) for item in turn]
        hidden = self._forward(cache, turn, pieces, [item.last_position for item in turn])
        return logits(self.policy, hidden)

    def _forward(
        self, cache: Cache | NativeCache, items: list[_Active], pieces: Sequence[tuple[int, ...]], starts: list[int]
    ) -> Tensor:
        """Compute the hidden states [R, H] of the last token of each piece, which begins at position starts[r]."""
        batch, seats = ragged(pieces, past=starts), [item.seat for item in items]
        hidden, routes = self._network.over_cache(batch, cache, seats, seen=self._routes is not None)
        if self._routes is not None:
            self._routes.note(ints(seats)[batch.rows.sequence], batch.rows.position, routes)
        return hidden if len(hidden) == len(pieces) else hidden[index(batch.start[1:] - 1).to(hidden.device)]

    def _sample(self, turn: list[_Active], found: Tensor, sampling: Sampling) -> None:
        seeds = torch.tensor([item.request.seed for item in turn])
        positions = torch.tensor([item.last_position for item in turn])
        found = found.to(torch.float32)
        samples = sample(found, seeds, positions, sampling, self.mode)
        drawn = Drawn(*(getattr(samples, field.name).numpy() for field in fields(Drawn)))
        for row, (item, token) in enumerate(zip(turn, samples.tokens.tolist(), strict=True)):
            item.add(token, drawn, row)


def _completion(item: _Active, reason: str, routes: CachedRoutes | None) -> Completion:
    return Completion(
        response_ids=tuple(token for turn in item.turns for token in turn),
        logprobs=torch.from_numpy(np.array([drawn.logprobs[row] for drawn, row in item.samples])),
        log_kept_mass=torch.from_numpy(np.array([drawn.log_kept_mass[row] for drawn, row in item.samples])),
        kept_tokens=_stacked([drawn.kept_tokens for drawn, _ in item.samples], item),
        finish_reason=reason,
        server=None,
        latency=None,
        episode_ids=tuple(item.tokens),
        is_forced=tuple(item.forced),
        routes=None if routes is None else routes.of(item.seat, item.last_position),
    )


def _stacked(columns: list[np.ndarray], item: _Active) -> Tensor:
    """Stack the item's rows of the arrays [n, W], one array for each of its T tokens: [T, W]."""
    if columns[0].shape[1] == 0:  # as usual; the rows need not be gathered
        return torch.from_numpy(np.empty((len(columns), 0), columns[0].dtype))
    return torch.from_numpy(np.array([column[row] for column, (_, row) in zip(columns, item.samples, strict=True)]))


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Convert the model's parameters to a dtype in place, and return the model.

    Buffers do not change, because rotary frequencies are float32 everywhere.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
