"""The engine on known responses: the same prefill, cache and decoding, without drawing tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.numerics.native import SlotCache
from ppo_repro.numerics.network import Cache
from ppo_repro.numerics.token_statistics import expand_kept, token_statistics, top_logits
from ppo_repro.rollout.engine import Completion, Dialogue, Request, Sampling
from ppo_repro.rollout.torch_engine import Drawn, PrefixIndex, TorchEngine, _Active


class Replay(TorchEngine):
    """Decodes `completions` again; `sequences` and `positions` [R, L] are those of the pass in progress."""

    def __init__(
        self, policy: PreTrainedModel, mode: str, max_context: int, slots: int, completions: Sequence[Completion]
    ) -> None:
        # no token ends a response: it ends where the known one does
        super().__init__(policy, frozenset(), mode, max_context, slots, prefill_chunk=0, prefix_cache=False)
        self.completions = completions
        self.sequences, self.positions = torch.empty(0), torch.empty(0)
        self.logits: list[list[Tensor]] = [[] for _ in completions]  # [V] of each token
        self._owner: dict[int, int] = {}

    def logprobs(self, requests: Sequence[Request], sampling: Sampling) -> Tensor:
        """Log-probs [n] float32 of the known tokens, decoded with the cache."""
        return torch.cat([c.logprobs for c in self.generate(requests, sampling)])

    def _prefill(self, cache: Cache | SlotCache, prefixes: PrefixIndex, turn: list[_Active]) -> Tensor:
        self._owner.update({item.slot: item.index for item in turn})
        return super()._prefill(cache, prefixes, turn)

    def _forward(
        self, cache: Cache | SlotCache, slots: list[int], pieces: Sequence[tuple[int, ...]], starts: list[int]
    ) -> Tensor:
        width = max(len(piece) for piece in pieces)
        lengths = torch.tensor([len(piece) for piece in pieces])[:, None]
        columns = torch.arange(width)
        self.sequences = torch.tensor([self._owner[slot] for slot in slots])[:, None].expand(-1, width)
        self.positions = torch.where(columns < lengths, torch.tensor(starts)[:, None] + columns, -1)
        return super()._forward(cache, slots, pieces, starts)

    def _sample(self, turn: list[_Active], found: Tensor, sampling: Sampling) -> None:
        next_tokens = [(self.completions[item.index], len(item.tokens)) for item in turn]
        tokens = torch.tensor([c.response_ids[position] for c, position in next_tokens])
        kept_tokens = torch.stack([c.kept_tokens[position] for c, position in next_tokens])
        found = found.to("cpu", torch.float32)
        eligible = expand_kept(kept_tokens, found.shape[-1])
        logprobs, _ = token_statistics(found, tokens, sampling.temperature, eligible, self.mode)
        mass = torch.stack([c.log_kept_mass[position] for c, position in next_tokens])
        top_ids, top = top_logits(found, sampling.temperature, sampling.top_logits)
        drawn = Drawn(*(x.numpy() for x in (logprobs, mass, kept_tokens, top_ids, top)))
        for row, (item, token) in enumerate(zip(turn, tokens.tolist(), strict=True)):
            item.add(token, drawn, row)
            self.logits[item.index].append(found[row])

    def _finish_reason(self, item: _Active, sampling: Sampling, dialogue: Dialogue | None) -> str:
        known = self.completions[item.index]
        return known.finish_reason if len(item.tokens) == len(known.response_ids) else ""
