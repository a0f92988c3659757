"""Stage `Rollout`: one sampled response to every prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ppo_repro.buffers import Prompts, Rollout
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Completion, Engine, Request, Sampling
from ppo_repro.stages.prompts import Task
from ppo_repro.tasks.tokenizer import decode, spans


def sampling_of(config: RunConfig, greedy: bool = False) -> Sampling:
    """The sampling distribution of the configuration. Greedy evaluation has no top-k, top-p or added mismatch."""
    rollout = config.rollout
    if greedy:
        return Sampling(1.0, 0, 1.0, rollout.max_response_tokens, greedy=True)
    return Sampling(
        rollout.temperature,
        rollout.top_k,
        rollout.top_p,
        rollout.max_response_tokens,
        mismatch_sigma=rollout.mismatch_sigma or 0.0,
        top_logits=config.records.logits_per_token,
    )


def require_undisturbed(config: RunConfig) -> None:
    """Raise UserError where the configuration adds noise to the sampler, which hides its real mismatch."""
    sigma = config.rollout.mismatch_sigma
    if sigma is not None:
        raise UserError(
            f"rollout.mismatch_sigma = {sigma}: must be null here, where sampler and trainer are compared; remove it"
        )


def generate(
    config: RunConfig, engine: Engine, requests: Sequence[Request], sampling: Sampling, ranks: Ranks
) -> list[Completion]:
    """All completions, in the order of the requests; each rank generates its share."""
    mine = ranks.mine(len(requests), config.layout.rank_shares)
    return ranks.gather(engine.generate([requests[i] for i in mine], sampling))


def roll_out(config: RunConfig, task: Task, engine: Engine, prompts: Prompts, ranks: Ranks) -> Rollout:
    """Sample one response to every prompt."""
    requests = [Request(ids, seed) for ids, seed in zip(prompts.prompt_ids, prompts.seeds, strict=True)]
    completions = generate(config, engine, requests, sampling_of(config), ranks)
    ids = torch.tensor([token for c in completions for token in c.response_ids], dtype=torch.int64)
    responses = tuple(decode(task.tokenizer, c.response_ids) for c in completions)
    return Rollout(
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
        responses=responses,
        spans=tuple(
            spans(task.tokenizer, c.response_ids, text) for c, text in zip(completions, responses, strict=True)
        ),
    )
