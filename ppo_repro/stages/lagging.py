"""Sampling with weights of earlier iterations: which version samples which tokens, and the answers that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ppo_repro.config.mismatch import FixedLag, LagConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.models.state import Versions
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Completion, Engine, Request
from ppo_repro.seeding import words
from ppo_repro.stages.generation import Answered, Sampled, generate, sampling_of
from ppo_repro.stages.prompts import Task
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.tokenizer import decode


def first_versions(lag: LagConfig, seeds: Sequence[int], newest: int) -> list[int]:
    """The version that each response begins with: the newest minus its lag, which its seed may draw, at least 0."""
    if isinstance(lag, FixedLag):
        return [max(0, newest - lag.iterations)] * len(seeds)
    lags = [int(words(1, "lag", seed)[0]) % (lag.max_iterations + 1) for seed in seeds]
    return [max(0, newest - behind) for behind in lags]


def version_of_tokens(first: int, newest: int, tokens: int, tokens_per_version: int | None) -> list[int]:
    """The version that sampled each token of a response of so many tokens."""
    if tokens_per_version is None:
        return [first] * tokens
    return [min(newest, first + position // tokens_per_version) for position in range(tokens)]


def generate_behind(
    config: RunConfig,
    task: Task,
    engine: Engine,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    ranks: Ranks,
    versions: Versions,
) -> tuple[list[Answered], list[list[int]]]:
    """As `generate`, with older weights; also the version of each token of each response.

    Responses of one version are sampled together. Where a response goes on with newer weights, all its keys and values
    are computed again by them. Afterwards the policy is what it was, and versions that nobody needs are forgotten.
    """
    lag, newest = config.mismatch.sampler.lag, versions.newest
    assert lag is not None
    first = first_versions(lag, seeds, newest)
    answers: dict[int, Answered] = {}
    if lag.tokens_per_version is not None:
        requests = [Request(task.prompt_ids[p.key], seed) for p, seed in zip(problems, seeds, strict=True)]
        completions = _in_parts(config, engine, requests, first, lag.tokens_per_version, ranks, versions)
        answers = {i: Answered(c, decode(task.tokenizer, c.response_ids), None) for i, c in completions.items()}
    else:
        for version in sorted(set(first)):
            group = [i for i, begun in enumerate(first) if begun == version]
            sampled = Sampled(sampling_of(config), [seeds[i] for i in group])
            with versions.at(version):
                found = generate(config, task, engine, [problems[i] for i in group], sampled, ranks)
            answers |= dict(zip(group, found, strict=True))
    versions.forget(newest + 1)
    ordered = [answers[i] for i in range(len(problems))]
    by_token = [
        version_of_tokens(begun, newest, len(answer.completion.response_ids), lag.tokens_per_version)
        for begun, answer in zip(first, ordered, strict=True)
    ]
    return ordered, by_token


def _in_parts(
    config: RunConfig,
    engine: Engine,
    requests: Sequence[Request],
    first: Sequence[int],
    part: int,
    ranks: Ranks,
    versions: Versions,
) -> dict[int, Completion]:
    """Completions by request, `part` tokens by each version and the remaining ones by the newest."""
    sampling, newest = sampling_of(config), versions.newest
    found: dict[int, Completion] = {}
    going_on = set(range(len(requests)))
    for version in range(min(first), newest + 1):
        for begun in sorted(set(first)):
            group = [i for i in sorted(going_on) if first[i] == begun <= version]
            if not group:
                continue
            room = sampling.max_response_tokens - (version - begun) * part
            size = room if version == newest else min(part, room)
            mine = [group[i] for i in ranks.mine(len(group))]
            asked = [_continued(requests[i], found.get(i)) for i in mine]
            with versions.at(version):
                sampled = engine.generate(asked, replace(sampling, max_response_tokens=size))
            for i, completion in zip(group, ranks.gather(sampled), strict=True):
                found[i] = _joined(found[i], completion) if i in found else completion
                if completion.finish_reason == "stop" or size == room:
                    going_on.discard(i)
    return found


def _continued(request: Request, so_far: Completion | None) -> Request:
    if so_far is None:
        return request
    return replace(request, prompt_ids=(*request.prompt_ids, *so_far.response_ids))


def _joined(a: Completion, b: Completion) -> Completion:
    """Two parts of a response, the second one sampled after the first."""
    return replace(
        b,
        response_ids=(*a.response_ids, *b.response_ids),
        logprobs=torch.cat([a.logprobs, b.logprobs]),
        log_kept_mass=torch.cat([a.log_kept_mass, b.log_kept_mass]),
        kept_tokens=torch.cat([a.kept_tokens, b.kept_tokens]),
        top_ids=torch.cat([a.top_ids, b.top_ids]),
        top_logits=torch.cat([a.top_logits, b.top_logits]),
        episode_ids=(*a.episode_ids, *b.episode_ids),
        is_forced=(*a.is_forced, *b.is_forced),
        routes=None if a.routes is None or b.routes is None else torch.cat([a.routes, b.routes[len(a.routes) :]]),
    )
