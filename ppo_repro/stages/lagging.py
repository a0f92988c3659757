"""Sampling with the weights of earlier iterations."""

from __future__ import annotations

from collections.abc import Sequence

from ppo_repro.config.run import RunConfig
from ppo_repro.models.versions import Versions
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Engine
from ppo_repro.stages.generation import Answered, Sampled, generate, sampling_of
from ppo_repro.stages.prompts import Task
from ppo_repro.tasks.problems import Problem


def generate_behind(
    config: RunConfig,
    task: Task,
    engine: Engine,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    ranks: Ranks,
    versions: Versions,
) -> tuple[list[Answered], list[list[int]]]:
    """As `generate`, with the weights of `lag` iterations ago, at most those of the start; also each token's version.

    Afterwards the policy has its newest weights again, and versions that nobody needs are forgotten.
    """
    newest = versions.newest
    version = max(0, newest - config.mismatch.sampler.lag)
    with versions.at(version):
        answers = generate(config, task, engine, problems, Sampled(sampling_of(config), seeds), ranks)
    versions.forget(newest + 1)
    return answers, [[version] * len(answer.completion.response_ids) for answer in answers]
