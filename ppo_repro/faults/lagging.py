"""A sampler with weights of earlier iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ppo_repro.models.state import TrainState
from ppo_repro.rollout.engine import Completion, Dialogue, Engine, Request, Sampling


@dataclass(frozen=True)
class LaggingEngine:
    """An engine whose policy is `lag` iterations behind when it samples. Greedy evaluation has the newest weights."""

    engine: Engine
    state: TrainState  # whose policy the engine has
    lag: int

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        """Sample with the weights of `lag` iterations ago, or the first ones; afterwards the policy is what it was."""
        if sampling.greedy:
            return self.engine.generate(requests, sampling, dialogue)
        versions, newest = self.state.versions, self.state.iteration
        assert versions is not None
        versions.keep(newest)
        version = max(0, newest - self.lag)
        with versions.at(version):
            completions = self.engine.generate(requests, sampling, dialogue)
        versions.forget(newest + 1)
        return [replace(c, policy_versions=(version,) * len(c.response_ids)) for c in completions]
