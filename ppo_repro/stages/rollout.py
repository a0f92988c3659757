"""Stage `Rollout`: one sampled response to every prompt."""

from __future__ import annotations

from dataclasses import fields
from itertools import compress

import torch
from torch import Tensor

from ppo_repro.buffers import Prompts, Rollout, Spans
from ppo_repro.config.run import RunConfig
from ppo_repro.models.state import Versions
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Completion, Engine
from ppo_repro.stages.generation import Answered, Sampled, episodes_of, generate, sampling_of
from ppo_repro.stages.lagging import generate_behind
from ppo_repro.stages.prompts import Task
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.retokenization import retokenized
from ppo_repro.tasks.tokenizer import spans


def _spans(task: Task, answer: Answered) -> Spans:
    """Where the text of each sampled token lies in the text of all."""
    of_all = spans(task.tokenizer, answer.ids, answer.text)
    if answer.episode is None:
        return of_all
    sampled = [not forced for forced in answer.episode.is_forced]
    return Spans(*(list(compress(getattr(of_all, column.name), sampled)) for column in fields(Spans)))


def _routes(completions: list[Completion]) -> tuple[Tensor, ...] | None:
    """The routes of all completions; None where the engine gave none."""
    found = tuple(c.routes for c in completions if c.routes is not None)
    return found or None


def roll_out(
    config: RunConfig, task: Task, engine: Engine, prompts: Prompts, ranks: Ranks, versions: Versions | None = None
) -> Rollout:
    """Sample one response to every prompt; with `versions` the sampler is behind, as the configuration says."""
    asked = [
        Problem(key, text, answer, task.judge.fields_of(key))
        for key, text, answer in zip(prompts.keys, prompts.texts, prompts.answers, strict=True)
    ]
    by_token: list[list[int]] | None = None
    if versions is None:
        answers = generate(config, task, engine, asked, Sampled(sampling_of(config), prompts.seeds), ranks)
    else:
        answers, by_token = generate_behind(config, task, engine, asked, prompts.seeds, ranks, versions)
    completions = [answer.completion for answer in answers]
    ids = torch.tensor([token for c in completions for token in c.response_ids], dtype=torch.int64)
    rollout = Rollout(
        prompts=prompts,
        response_ids=ids,
        lengths=torch.tensor([len(c.response_ids) for c in completions]),
        rollout_logprobs=torch.cat([c.logprobs for c in completions]),
        log_kept_mass=torch.cat([c.log_kept_mass for c in completions]),
        kept_tokens=torch.cat([c.kept_tokens for c in completions]),
        top_ids=torch.cat([c.top_ids for c in completions]),
        top_logits=torch.cat([c.top_logits for c in completions]),
        finish_reasons=tuple(c.finish_reason for c in completions),
        servers=tuple(c.server for c in completions),
        latencies=tuple(c.latency for c in completions),
        responses=tuple(answer.text for answer in answers),
        spans=tuple(_spans(task, answer) for answer in answers),
        episodes=episodes_of(answers),
        policy_versions=None if by_token is None else tuple(map(tuple, by_token)),
        routes=_routes(completions),
    )
    return retokenized(config, task.tokenizer, rollout)
