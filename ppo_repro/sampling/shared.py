"""Wrap samplers: share one among all processes of a run, or evaluate with the built-in sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppo_repro.base.ranks import Ranks
from ppo_repro.sampler import Completion, Request, Sampler, Sampling


@dataclass(frozen=True)
class SharedSampler:
    """Samples for all processes of a run with the sampler of the first process."""

    ranks: Ranks
    sampler: Sampler | None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        batches = self.ranks.everyone(list(requests))
        start = sum(len(batch) for batch in batches[: self.ranks.rank])

        def sampled() -> list[Completion]:
            assert self.sampler is not None
            return self.sampler.generate([request for batch in batches for request in batch], sampling)

        return self.ranks.first(sampled)[start : start + len(requests)]


@dataclass(frozen=True)
class EvaluatedHere:
    """Samples with a sampler whose bits are not promised, and evaluates greedily with the built-in sampler."""

    sampler: Sampler
    built_in: Sampler

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        sampler = self.built_in if sampling.greedy else self.sampler
        return sampler.generate(requests, sampling)
