"""A sampler with weights of earlier iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ppo_repro.config.mismatch import FixedLag, LagConfig
from ppo_repro.models.state import TrainState
from ppo_repro.rollout.engine import Completion, Dialogue, Engine, Request, Sampling
from ppo_repro.seeding import words


def first_versions(lag: LagConfig, seeds: Sequence[int], newest: int) -> list[int]:
    """Return the version that each response begins with: the newest minus its lag, which its seed may draw."""
    if isinstance(lag, FixedLag):
        return [max(0, newest - lag.iterations)] * len(seeds)
    lags = [int(words(1, "lag", seed)[0]) % (lag.max_iterations + 1) for seed in seeds]
    return [max(0, newest - behind) for behind in lags]


def version_of_tokens(first: int, newest: int, tokens: int, tokens_per_version: int | None) -> tuple[int, ...]:
    """Return the version that sampled each token of a response of so many tokens."""
    if tokens_per_version is None:
        return (first,) * tokens
    return tuple(min(newest, first + position // tokens_per_version) for position in range(tokens))


@dataclass(frozen=True)
class LaggingEngine:
    """An engine whose policy is behind when it samples. Greedy evaluation has the newest weights."""

    engine: Engine
    state: TrainState  # whose policy the engine has
    lag: LagConfig

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        """Sample the responses of one version together; afterwards the policy is what it was.

        Where a response goes on with newer weights, all its keys and values are computed again by them. Every process
        visits every version, because the processes of a run call an engine together.
        """
        if sampling.greedy:
            return self.engine.generate(requests, sampling, dialogue)
        versions, newest = self.state.versions, self.state.iteration
        assert versions is not None
        versions.keep(newest)
        oldest = max(0, newest - self.lag.most)
        first = first_versions(self.lag, [request.seed for request in requests], newest)
        completions: dict[int, Completion] = {}
        if self.lag.tokens_per_version is not None:
            completions = self._in_parts(requests, sampling, first, oldest, self.lag.tokens_per_version)
        else:
            for version in range(oldest, newest + 1):
                group = [i for i, begun in enumerate(first) if begun == version]
                own = None if dialogue is None else _Chosen(dialogue, group)
                with versions.at(version):
                    sampled = self.engine.generate([requests[i] for i in group], sampling, own)
                completions |= dict(zip(group, sampled, strict=True))
        versions.forget(newest + 1)
        return [
            replace(
                c, policy_versions=version_of_tokens(begun, newest, len(c.response_ids), self.lag.tokens_per_version)
            )
            for begun, c in zip(first, (completions[i] for i in range(len(requests))), strict=True)
        ]

    def _in_parts(
        self, requests: Sequence[Request], sampling: Sampling, first: Sequence[int], oldest: int, part: int
    ) -> dict[int, Completion]:
        """Completions by request, `part` tokens by each version and the remaining ones by the newest."""
        newest, versions = self.state.iteration, self.state.versions
        assert versions is not None
        so_far: dict[int, Completion] = {}
        going_on = set(range(len(requests)))
        for version in range(oldest, newest + 1):
            for begun in range(oldest, version + 1):
                group = [i for i in sorted(going_on) if first[i] == begun]
                room = sampling.max_response_tokens - (version - begun) * part
                if room <= 0:
                    continue
                size = room if version == newest else min(part, room)
                asked = [_continued(requests[i], so_far.get(i)) for i in group]
                with versions.at(version):
                    sampled = self.engine.generate(asked, replace(sampling, max_response_tokens=size))
                for i, completion in zip(group, sampled, strict=True):
                    so_far[i] = _joined(so_far[i], completion) if i in so_far else completion
                    if completion.finish_reason == "stop" or size == room:
                        going_on.discard(i)
        return so_far


@dataclass(frozen=True)
class _Chosen:
    """The dialogue of some of the requests."""

    dialogue: Dialogue
    group: Sequence[int]

    def ends(self, turn: Sequence[int]) -> bool:
        return self.dialogue.ends(turn)

    def reply(self, index: int, turns: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        return self.dialogue.reply(self.group[index], turns)


def _continued(request: Request, so_far: Completion | None) -> Request:
    if so_far is None:
        return request
    return replace(request, prompt_ids=(*request.prompt_ids, *so_far.response_ids))


def _joined(a: Completion, b: Completion) -> Completion:
    """Join two parts of a response, the second one sampled after the first."""
    return replace(
        b,
        response_ids=(*a.response_ids, *b.response_ids),
        logprobs=torch.cat([a.logprobs, b.logprobs]),
        log_kept_mass=torch.cat([a.log_kept_mass, b.log_kept_mass]),
        kept_tokens=torch.cat([a.kept_tokens, b.kept_tokens]),
        top_ids=torch.cat([a.top_ids, b.top_ids]),
        top_logits=torch.cat([a.top_logits, b.top_logits]),
        routes=None if a.routes is None or b.routes is None else torch.cat([a.routes, b.routes[len(a.routes) :]]),
    )
