"""The distributions that log-probs may be of: the model's own, tempered, or after penalties and cuts in each order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ppo_repro.testing.audit.stack import StackSampling

HEAD = 1024  # tokens that top-p is looked for in, before all are sorted


@dataclass(frozen=True)
class Chunk:
    """Logits of k neighbouring tokens of one response."""

    logits: Tensor  # [k, V]
    targets: Tensor  # [k]
    prompt: tuple[int, ...]  # the ids before the response
    before: tuple[int, ...]  # the response's ids before the first target
    sampling: StackSampling
    counts: Tensor  # bool [n], which tokens of the response count

    @property
    def here(self) -> slice:
        """Return the positions of the k tokens in the response."""
        return slice(len(self.before), len(self.before) + len(self.targets))

    @cached_property
    def seen(self) -> Tensor:
        """Count how often each token occurs before each target, in prompt and response, int32 [k, V]."""
        return self.seen_in_response + self._counted(self.prompt)

    @cached_property
    def seen_in_response(self) -> Tensor:
        """Count how often each token occurs before each target in the response, int32 [k, V]."""
        counts = torch.zeros_like(self.logits, dtype=torch.int32)
        counts[range(1, len(counts)), self.targets[:-1]] = 1
        return counts.cumsum(0, dtype=torch.int32) + self._counted(self.before)

    def _counted(self, ids: tuple[int, ...]) -> Tensor:
        on = torch.tensor(ids, dtype=torch.long, device=self.logits.device)
        return torch.bincount(on, minlength=self.logits.shape[-1]).int()


def cut(scaled: Tensor, top_k: int, top_p: float, min_p: float, first: Collection[str] = ()) -> Tensor:
    """Set the logits of tokens that a cut drops to -inf.

    Args:
        scaled: logits / temperature [n, V].
        top_k: number of tokens that stay, 0 for all.
        top_p: probability that stays, 1 for all.
        min_p: tokens stay if p >= min_p times the largest p; 0 for all.
        first: the cuts among "top-k" and "min-p" that come before top-p; top-p then counts only their tokens.

    Returns:
        Logits [n, V].
    """
    least, vocabulary = dict[str, Tensor](), scaled.shape[-1]  # least: the smallest logit that a cut keeps
    if top_k > 0:
        least["top-k"] = scaled.topk(min(top_k, vocabulary)).values[:, -1:]
    if min_p > 0.0:
        least["min-p"] = scaled.amax(-1, keepdim=True) + math.log(min_p)
    if top_p < 1.0:
        counted = scaled
        for name in first:
            counted = counted.masked_fill(counted < least[name], -math.inf) if name in least else counted
        total, size = counted.logsumexp(-1, keepdim=True), min(HEAD, vocabulary)
        while True:
            ranked = counted.topk(size).values
            p = (ranked - total).exp()
            count = (p.cumsum(-1) - p <= top_p).sum(-1, keepdim=True).clamp_min(1)
            if size == vocabulary or bool((count < size).all()):
                break
            size = vocabulary
        least["top-p"] = ranked.gather(-1, count - 1)
    for limit in least.values():
        scaled = scaled.masked_fill(scaled < limit, -math.inf)
    return scaled


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the logits of tokens with `seen` > 0 by the penalty, or multiply them if below 0 (Keskar et al., 2019)."""
    return torch.where(seen > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


@dataclass(frozen=True)
class Definition:
    """A distribution that log-probs may be of."""

    kind: Literal["tempered", "processed", "raw"]
    logits: Callable[[Chunk], Tensor]  # [k, V] whose softmax is the distribution of the chunk's tokens
    uncut: Callable[[Chunk], Tensor] | None = None  # the same before the cuts; None: there are none
    order: str = ""  # of the cuts, in words, with the engines that have it
    differs: Callable[[StackSampling], bool] = lambda sampling: True  # whether these settings tell it from the others

    def target_logprobs(self, chunk: Chunk) -> Tensor:
        """Return the log-prob of each target [k]; a target that the cuts drop is kept too.

        Rounding moves a token across the end of a cut. A sampler that drew the token had kept it.
        """
        logits = self.logits(chunk)
        uncut = logits if self.uncut is None else self.uncut(chunk)
        targets = chunk.targets[:, None]
        own = uncut.gather(-1, targets)[:, 0]
        total = logits.logsumexp(-1)
        is_dropped = logits.gather(-1, targets)[:, 0] == -math.inf
        return own - torch.where(is_dropped, torch.logaddexp(own, total), total)

    @property
    def words(self) -> str:
        """Return its kind and its order of cuts."""
        return f"{self.kind}{self.order}"

    @property
    def words_beside_others(self) -> str:
        """Return its words where another order of cuts is named too."""
        return self.words if self.order else f"{self.kind}, each cut of all tokens"


def _in_order(
    order: str, differs: Callable[[StackSampling], bool], first: Collection[str] = (), is_cut_first: bool = False
) -> Definition:
    """Return the distribution after penalty, temperature and cuts; if `is_cut_first`, cuts come before temperature."""

    def uncut(chunk: Chunk) -> Tensor:
        return _penalised(chunk) / chunk.sampling.temperature

    def processed(chunk: Chunk) -> Tensor:
        s = chunk.sampling
        cuts = s.top_k, s.top_p, s.min_p, first
        return cut(_penalised(chunk), *cuts) / s.temperature if is_cut_first else cut(uncut(chunk), *cuts)

    return Definition("processed", processed, uncut, order, differs)


def _penalised(chunk: Chunk) -> Tensor:
    penalty = chunk.sampling.repetition_penalty
    return chunk.logits if penalty == 1.0 else penalised(chunk.logits, chunk.seen, penalty)


def _is_temperature_last(s: StackSampling) -> bool:
    """Return whether it matters that the temperature comes after the cuts."""
    return s.is_tempered() and (s.top_p < 1.0 or s.min_p > 0.0)


OF_TOP_K = ", top-p of what top-k leaves"
TEMPERED = Definition("tempered", lambda chunk: chunk.logits / chunk.sampling.temperature)
RAW = Definition("raw", lambda chunk: chunk.logits)
EACH_CUT_OF_ALL = _in_order("", StackSampling.is_processed)
PROCESSED = (
    EACH_CUT_OF_ALL,
    _in_order(f"{OF_TOP_K} (Transformers, vLLM)", StackSampling.has_top_k_and_p, ("top-k",)),
    _in_order(
        ", top-p of what min-p and top-k leave (vLLM)", lambda s: s.min_p > 0.0 and s.top_p < 1.0, ("min-p", "top-k")
    ),
    _in_order(", the cuts before the temperature (MLX)", _is_temperature_last, is_cut_first=True),
    _in_order(
        f"{OF_TOP_K}, before the temperature (llama.cpp)",
        lambda s: s.has_top_k_and_p() and _is_temperature_last(s),
        ("top-k",),
        is_cut_first=True,
    ),
)


def sampled_from(sampling: StackSampling) -> list[Definition]:
    """Return the distributions that a stack with these settings may sample from."""
    return [definition for definition in PROCESSED if definition.differs(sampling)] or [TEMPERED]


def definitions_of(sampling: StackSampling) -> list[Definition]:
    """Return the definitions that the settings distinguish, or that the user asked for."""
    said = {sampling.sampler_logprobs, sampling.trainer_logprobs}
    asked = (definition for definition in (EACH_CUT_OF_ALL, RAW) if definition.kind in said)
    return list(dict.fromkeys([TEMPERED, *sampled_from(sampling), *asked]))


def target_logprobs(targets: Tensor, logits: Tensor) -> Tensor:
    """Return the log-prob of each target [n] in the softmax of logits [n, V]."""
    return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
