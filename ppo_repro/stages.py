"""The stages of one iteration, each a function from the stages before it to the next frozen type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from ppo_repro.buffers import Advantages, ForwardPass, Prompts, Rewards, Rollout
from ppo_repro.config import RunConfig
from ppo_repro.ppo import kl
from ppo_repro.ppo.advantages import gae, whiten
from ppo_repro.ppo.rewards import token_rewards
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Completion, Engine, Request, Sampling
from ppo_repro.seeding import sample_seed
from ppo_repro.tasks.problems import Problem, Split, choose
from ppo_repro.tasks.rewards import UserReward, score
from ppo_repro.tasks.tokenizer import decode


@dataclass(frozen=True)
class Task:
    """What is asked and how it is judged."""

    problems: Split
    prompt_ids: dict[str, tuple[int, ...]]  # by problem key
    reward: UserReward | None  # None: exact match
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Evaluation:
    """Greedy decoding of the held-out prompts."""

    accuracy: float
    score: float


def choose_prompts(config: RunConfig, task: Task, iteration: int) -> Prompts:
    """The prompts of an iteration, each `samples_per_prompt` times, every response with a seed of its own."""
    chosen = choose(task.problems.train, config.rollout.prompts_per_iteration, config.seed, iteration)
    # a small task can meet a prompt twice in one iteration; its samples are then numbered on
    entries: list[tuple[Problem, int]] = []
    drawn: dict[str, int] = {}
    for problem in chosen:
        first = drawn.get(problem.key, 0)
        drawn[problem.key] = first + config.rollout.samples_per_prompt
        entries += [(problem, first + i) for i in range(config.rollout.samples_per_prompt)]
    return Prompts(
        keys=tuple(p.key for p, _ in entries),
        sample_indices=tuple(i for _, i in entries),
        seeds=tuple(sample_seed(config.seed, iteration, p.key, i) for p, i in entries),
        texts=tuple(p.prompt for p, _ in entries),
        answers=tuple(p.answer for p, _ in entries),
        prompt_ids=tuple(task.prompt_ids[p.key] for p, _ in entries),
    )


def sampling_of(config: RunConfig, greedy: bool = False) -> Sampling:
    """The sampling distribution of the configuration; greedy evaluation cuts nothing."""
    rollout = config.rollout
    if greedy:
        return Sampling(1.0, 0, 1.0, rollout.max_response_tokens, greedy=True)
    return Sampling(rollout.temperature, rollout.top_k, rollout.top_p, rollout.max_response_tokens)


def _generate(
    config: RunConfig, engine: Engine, requests: Sequence[Request], sampling: Sampling, ranks: Ranks
) -> list[Completion]:
    """All completions, in the order of the requests; each rank generates its own."""
    mine = ranks.mine(len(requests), config.layout.rank_shares)
    return ranks.gather(engine.generate([requests[i] for i in mine], sampling))


def roll_out(config: RunConfig, task: Task, engine: Engine, prompts: Prompts, ranks: Ranks) -> Rollout:
    """Sample one response to every prompt."""
    requests = [Request(ids, seed) for ids, seed in zip(prompts.prompt_ids, prompts.seeds, strict=True)]
    completions = _generate(config, engine, requests, sampling_of(config), ranks)
    ids = torch.tensor([token for c in completions for token in c.response_ids], dtype=torch.int64)
    return Rollout(
        prompts=prompts,
        response_ids=ids,
        lengths=torch.tensor([len(c.response_ids) for c in completions]),
        rollout_logprobs=torch.cat([c.logprobs for c in completions]),
        log_kept_mass=torch.cat([c.log_kept_mass for c in completions]),
        kept_tokens=torch.cat([c.kept_tokens for c in completions]),
        is_forced=torch.zeros(len(ids), dtype=torch.bool),
        finish_reasons=tuple(c.finish_reason for c in completions),
        responses=tuple(decode(task.tokenizer, c.response_ids) for c in completions),
    )


def compute_rewards(config: RunConfig, task: Task, rollout: Rollout, forward: ForwardPass, ranks: Ranks) -> Rewards:
    """Score the responses, once and on one rank, and charge KL(policy || reference) on every token."""
    prompts = rollout.prompts
    finished = [reason == "stop" for reason in rollout.finish_reasons]
    scores, correct = ranks.first(score, task.reward, prompts.texts, rollout.responses, prompts.answers, finished)
    log_ratio = forward.old_logprobs - forward.ref_logprobs
    penalties = kl.estimate(config.ppo.kl_estimator, log_ratio) * config.ppo.kl_coef
    return Rewards(
        scores=torch.tensor(scores, dtype=torch.float64),
        is_correct=torch.tensor(correct),
        kl_penalties=penalties,
        rewards=token_rewards(torch.tensor(scores, dtype=torch.float64), penalties, rollout.lengths),
    )


def compute_advantages(config: RunConfig, rollout: Rollout, forward: ForwardPass, rewards: Rewards) -> Advantages:
    """GAE, value targets, whitening over all tokens of the iteration."""
    ppo = config.ppo
    final_values = torch.zeros(len(rollout.lengths))
    raw = gae(rewards.rewards, forward.values, rollout.lengths, final_values, ppo.gamma, ppo.gae_lambda)
    advantages = whiten(raw) if ppo.whiten_advantages else raw
    return Advantages(raw_advantages=raw, advantages=advantages, returns=raw + forward.values)


def evaluate(config: RunConfig, task: Task, engine: Engine, ranks: Ranks) -> Evaluation:
    """Greedy accuracy and mean score on the held-out prompts."""
    problems: Sequence[Problem] = task.problems.held_out
    requests = [Request(task.prompt_ids[p.key], 0) for p in problems]
    completions = _generate(config, engine, requests, sampling_of(config, greedy=True), ranks)
    scores, correct = ranks.first(
        score,
        task.reward,
        [p.prompt for p in problems],
        [decode(task.tokenizer, c.response_ids) for c in completions],
        [p.answer for p in problems],
        [c.finish_reason == "stop" for c in completions],
    )
    return Evaluation(sum(correct) / len(correct), sum(scores) / len(scores))
