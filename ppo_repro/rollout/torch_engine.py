"""The built-in engine: prefill and cached decoding of any number of requests over a few slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.numerics import backend
from ppo_repro.numerics.layers.families import head_of, stock_masks, trunk_of
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.trunk.decoding import Decoder, decode
from ppo_repro.numerics.trunk.weights import parts_of
from ppo_repro.rollout.engine import Completion, Request, Sampling, check_request
from ppo_repro.rollout.prefix import PrefixIndex
from ppo_repro.rollout.sampler import sample
from ppo_repro.rollout.stock_cache import SlotCache

Cache = GridCache | SlotCache


@dataclass(frozen=True)
class Drawn:
    """A `Sample` as NumPy has it, which is quicker with single numbers."""

    logprobs: np.ndarray
    log_kept_mass: np.ndarray
    kept_tokens: np.ndarray


@dataclass
class _Active:
    """A request in a slot and what it has sampled so far."""

    index: int
    request: Request
    slot: int
    known: int = 0  # prompt tokens whose keys and values the slot holds
    tokens: list[int] = field(default_factory=list)
    samples: list[tuple[Drawn, int]] = field(default_factory=list)

    @property
    def last_position(self) -> int:
        """Position of the last token the model knows, prompt and samples together."""
        return len(self.request.prompt_ids) + len(self.tokens) - 1


class TorchEngine:
    """Samples from the live weights of `policy`; nothing is cached between calls."""

    def __init__(
        self,
        policy: PreTrainedModel,
        stop_ids: frozenset[int],
        mode: str,
        max_context: int,
        slots: int,
        prefill_chunk: int,
        prefix_cache: bool = True,
    ) -> None:
        self.policy, self.stop_ids, self.mode = policy, stop_ids, mode
        self.max_context, self.slots = max_context, slots
        self.prefill_chunk = prefill_chunk or max_context
        self.prefix_cache = prefix_cache
        self._decoder: Decoder | None = None  # of the generation in progress; without one the modules are called

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        for request in requests:
            check_request(request, sampling, self.policy.config.vocab_size, self.max_context)
        slots = min(self.slots, len(requests))
        kind = GridCache if self.mode == "exact" else SlotCache
        cache = kind(self.policy.config, slots, self.max_context, self.policy.device)
        has_kernels = self.mode == "exact" and backend.has_kernels(next(self.policy.parameters()))
        parts = parts_of(trunk_of(self.policy)) if has_kernels else None
        self._decoder = None if parts is None else Decoder(parts)
        free = list(range(slots))
        held = PrefixIndex()
        waiting = deque(enumerate(requests))
        active: list[_Active] = []
        done: dict[int, Completion] = {}
        while waiting or active:
            if waiting and free:
                turn = [_Active(*waiting.popleft(), free.pop()) for _ in range(min(len(free), len(waiting)))]
                logits = self._prefill(cache, held, turn)
                active += turn
            else:
                turn = active
                logits = self._decode(cache, turn)
            self._sample(turn, logits, sampling)
            for item in turn:
                reason = self._finish_reason(item, sampling)
                if reason:
                    done[item.index] = _completion(item, reason)
                    free.append(item.slot)
                    held.hold(item.slot, (*item.request.prompt_ids, *item.tokens[:-1]))
            active = [item for item in active if item.index not in done]
        return [done[index] for index in range(len(requests))]

    def _admit(self, cache: Cache, held: PrefixIndex, turn: list[_Active]) -> list[list[_Active]]:
        """Give prompts what the slots hold of them; returns those to prefill now, and their copies for after that."""
        leaders: dict[tuple[int, ...], _Active] = {}
        copies: list[_Active] = []
        for item in turn:
            prompt = item.request.prompt_ids
            if not self.prefix_cache:
                leaders[(*prompt, item.index)] = item
            elif prompt in leaders:
                copies.append(item)
            else:
                self._take_over(cache, held, item)
                leaders[prompt] = item
            held.hold(item.slot, ())
        return [list(leaders.values()), copies] if copies else [list(leaders.values())]

    def _take_over(self, cache: Cache, held: PrefixIndex, item: _Active) -> None:
        """Copy the longest prefix any slot holds; the last prompt token is always computed, for its logits."""
        source, item.known = held.longest(item.request.prompt_ids[:-1])
        if item.known and source != item.slot:
            cache.copy_prefix(source, item.slot, item.known)

    def _prefill(self, cache: Cache, held: PrefixIndex, turn: list[_Active]) -> Tensor:
        """Run what is not known of the prompts; logits [len(turn), V] after each prompt."""
        out = torch.empty(len(turn), self.policy.config.vocab_size)
        place = {item.index: row for row, item in enumerate(turn)}
        for wave, items in enumerate(self._admit(cache, held, turn)):
            for item in items:
                if wave:  # what it is a copy of is in the cache now
                    self._take_over(cache, held, item)
            for item, logits in self._chunks(cache, items):
                out[place[item.index]] = logits
                held.hold(item.slot, item.request.prompt_ids)
        return out

    def _chunks(self, cache: Cache, items: list[_Active]) -> Iterator[tuple[_Active, Tensor]]:
        """Prefill, `prefill_chunk` tokens of each prompt at a time; yields logits [V] as prompts come to their end."""
        while items:
            pieces = [item.request.prompt_ids[item.known : item.known + self.prefill_chunk] for item in items]
            hidden = self._forward(cache, [item.slot for item in items], pieces, [item.known for item in items])
            for item, piece in zip(items, pieces, strict=True):
                item.known += len(piece)
            ends = [row for row, item in enumerate(items) if item.known == len(item.request.prompt_ids)]
            if ends:
                columns = torch.tensor([len(pieces[row]) - 1 for row in ends])
                logits = head_of(self.policy)(hidden[torch.tensor(ends), columns])
                yield from zip((items[row] for row in ends), logits, strict=True)
            items = [item for item in items if item.known < len(item.request.prompt_ids)]

    def _decode(self, cache: Cache, turn: list[_Active]) -> Tensor:
        slots, starts = [item.slot for item in turn], [item.last_position for item in turn]
        if isinstance(cache, GridCache) and self._decoder is not None:
            positions = torch.tensor(starts)[:, None]
            cache.aim(torch.tensor(slots), positions, torch.ones_like(positions, dtype=torch.bool))
            last = torch.tensor([item.tokens[-1] for item in turn])
            return head_of(self.policy)(decode(self._decoder, last, cache))
        hidden = self._forward(cache, slots, [(item.tokens[-1],) for item in turn], starts)
        return head_of(self.policy)(hidden[:, 0])

    def _forward(self, cache: Cache, slots: list[int], pieces: Sequence[tuple[int, ...]], starts: list[int]) -> Tensor:
        """Hidden states [R, L, H] of right-padded pieces, row r beginning at position starts[r]."""
        lengths = torch.tensor([len(piece) for piece in pieces])
        width = int(lengths.max())
        ids = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in pieces])
        columns = torch.arange(width)
        valid = columns < lengths[:, None]
        # a padded query sits at position 0, where it sees one key, and its result is not used
        positions = torch.where(valid, torch.tensor(starts)[:, None] + columns, 0)
        cache.aim(torch.tensor(slots), positions, valid)
        trunk = trunk_of(self.policy)
        if isinstance(cache, GridCache):
            everything = torch.ones_like(ids)  # see hidden_states: what is visible is the cache's
            out = trunk(
                input_ids=ids, position_ids=positions, attention_mask=everything, kv_cache=cache, use_cache=False
            )
        else:
            out = trunk(
                input_ids=ids,
                position_ids=positions,
                attention_mask=stock_masks(trunk.config, lambda window: within(positions, window)),
                past_key_values=cache,
                use_cache=False,
            )
        return out.last_hidden_state

    def _sample(self, turn: list[_Active], logits: Tensor, sampling: Sampling) -> None:
        seeds = torch.tensor([item.request.seed for item in turn])
        positions = torch.tensor([item.last_position for item in turn])
        found = sample(logits, seeds, positions, sampling, self.mode)
        drawn = Drawn(*(x.numpy() for x in (found.logprobs, found.log_kept_mass, found.kept_tokens)))
        for row, (item, token) in enumerate(zip(turn, found.tokens.tolist(), strict=True)):
            item.tokens.append(token)
            item.samples.append((drawn, row))

    def _finish_reason(self, item: _Active, sampling: Sampling) -> str:
        if item.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(item.tokens) == sampling.max_response_tokens else ""


def within(positions: Tensor, window: int | None) -> Tensor:
    """bool [R, 1, L, J]: queries at `positions` [R, L] see cached keys 0..position, at most the last `window`."""
    keys, last = torch.arange(int(positions.max()) + 1), positions[:, None, :, None]
    return (keys <= last) if window is None else (keys <= last) & (keys > last - window)


def _completion(item: _Active, reason: str) -> Completion:
    return Completion(
        response_ids=tuple(item.tokens),
        logprobs=torch.from_numpy(np.array([drawn.logprobs[row] for drawn, row in item.samples])),
        log_kept_mass=torch.from_numpy(np.array([drawn.log_kept_mass[row] for drawn, row in item.samples])),
        kept_tokens=torch.from_numpy(np.array([drawn.kept_tokens[row] for drawn, row in item.samples])),
        finish_reason=reason,
    )
