"""Wrap engines: share one among all processes of a run, or evaluate with the built-in engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppo_repro.base.ranks import Ranks
from ppo_repro.engine import Completion, Dialogue, Engine, Request, Sampling


@dataclass(frozen=True)
class SharedEngine:
    """Samples for all processes of a run with the engine of the first process."""

    ranks: Ranks
    engine: Engine | None

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        batches = self.ranks.everyone(list(requests))
        start = sum(len(batch) for batch in batches[: self.ranks.rank])

        def sampled() -> list[Completion]:
            assert self.engine is not None
            return self.engine.generate([request for batch in batches for request in batch], sampling, dialogue)

        return self.ranks.first(sampled)[start : start + len(requests)]


@dataclass(frozen=True)
class EvaluatedHere:
    """Samples with an engine whose bits are not promised, and evaluates greedily with the built-in engine."""

    engine: Engine
    built_in: Engine

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        engine = self.built_in if sampling.greedy else self.engine
        return engine.generate(requests, sampling, dialogue)
