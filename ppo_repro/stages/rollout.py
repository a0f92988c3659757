"""The stages of one iteration, each a function from the stages before it to the next frozen type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_repro.buffers import Advantages, ForwardPass, MinibatchUpdate, Prompts, Rewards, Rollout
from ppo_repro.config.algorithm import (
    AdaptiveClipObjective,
    AdaptiveController,
    FixedController,
    GaeAdvantages,
    GroupAdvantages,
    KLInReward,
    NoKL,
    NoValue,
    PenaltyObjective,
)
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.models.reward_model import reward_scores
from ppo_repro.ppo import kl
from ppo_repro.ppo.advantages import gae, group_advantages, whiten
from ppo_repro.ppo.controllers import (
    Controls,
    ReturnStatistics,
    adaptive_clip_range,
    adaptive_kl_coef,
    adaptive_penalty_coef,
)
from ppo_repro.ppo.rewards import charge_penalties, place_scores, shaping_rewards, token_rewards
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Completion, Engine, Request, Sampling
from ppo_repro.seeding import sample_seed
from ppo_repro.tasks.problems import Problem, Split, choose
from ppo_repro.tasks.rewards import Judge, Judgement, Samples, judge_samples, potentials
from ppo_repro.tasks.tokenizer import decode, spans


@dataclass(frozen=True)
class Task:
    """What is asked and how it is judged."""

    problems: Split
    prompt_ids: dict[str, tuple[int, ...]]  # by problem key
    judge: Judge
    reward_model: PreTrainedModel | None  # frozen; None where no term of the reward is one
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
    """The sampling distribution of the configuration; greedy evaluation cuts and disturbs nothing."""
    rollout = config.rollout
    if greedy:
        return Sampling(1.0, 0, 1.0, rollout.max_response_tokens, greedy=True)
    return Sampling(
        rollout.temperature,
        rollout.top_k,
        rollout.top_p,
        rollout.max_response_tokens,
        mismatch_sigma=rollout.mismatch_sigma or 0.0,
    )


def require_undisturbed(config: RunConfig) -> None:
    """Raise UserError where the sampler is disturbed on purpose, which hides how two paths compute."""
    sigma = config.rollout.mismatch_sigma
    if sigma is not None:
        raise UserError(
            f"rollout.mismatch_sigma = {sigma}: must be null here, where sampler and trainer are compared; remove it"
        )


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
    responses = tuple(decode(task.tokenizer, c.response_ids) for c in completions)
    return Rollout(
        prompts=prompts,
        response_ids=ids,
        lengths=torch.tensor([len(c.response_ids) for c in completions]),
        rollout_logprobs=torch.cat([c.logprobs for c in completions]),
        log_kept_mass=torch.cat([c.log_kept_mass for c in completions]),
        kept_tokens=torch.cat([c.kept_tokens for c in completions]),
        is_forced=torch.zeros(len(ids), dtype=torch.bool),
        finish_reasons=tuple(c.finish_reason for c in completions),
        responses=responses,
        places=tuple(
            spans(task.tokenizer, c.response_ids, text) for c, text in zip(completions, responses, strict=True)
        ),
    )


def _judge(
    config: RunConfig,
    task: Task,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    samples: Samples,
    ranks: Ranks,
) -> Judgement:
    """The reward model's scores, shared out; everything else once, on one rank."""
    scores: list[float] = []
    if task.reward_model is not None:
        mine = ranks.mine(len(prompts), config.layout.rank_shares)
        sequences = [(*prompts[i], *responses[i]) for i in mine]
        layout = config.layout
        found = reward_scores(task.reward_model, sequences, layout.padding, layout.forward_micro_batch)
        scores = ranks.gather(found.tolist())
    return ranks.first(judge_samples, task.judge, samples, scores)


def compute_rewards(
    config: RunConfig, task: Task, rollout: Rollout, forward: ForwardPass, kl_coef: float, ranks: Ranks
) -> Rewards:
    """Judge the responses, once and on one rank; place the score, charge the KL penalty, shape, whiten."""
    ids = [part.tolist() for part in torch.split(rollout.response_ids, rollout.lengths.tolist())]
    samples = Samples(
        rollout.prompts.texts,
        rollout.responses,
        rollout.prompts.answers,
        [reason == "stop" for reason in rollout.finish_reasons],
        rollout.lengths.tolist(),
    )
    judged = _judge(config, task, rollout.prompts.prompt_ids, ids, samples, ranks)
    scores = torch.tensor(judged.scores, dtype=torch.float64)
    penalties = _kl_penalties(config, rollout, forward, kl_coef)
    placed = place_scores(scores, rollout.lengths, rollout.word_ids(), config.reward.placement)
    if task.judge.potential is not None:
        placed = placed + _shaping(config, task, rollout, ranks)
    rewards = token_rewards(placed, penalties)
    if config.reward.whiten != "none":
        rewards = whiten(rewards, shift=config.reward.whiten == "full")
    return Rewards(
        scores=scores,
        score_parts=tuple(tuple(row) for row in judged.parts),
        is_correct=torch.tensor(judged.correct),
        kl_penalties=penalties,
        rewards=rewards,
    )


def _kl_penalties(config: RunConfig, rollout: Rollout, forward: ForwardPass, kl_coef: float) -> Tensor:
    if not isinstance(config.kl, KLInReward):
        return torch.zeros_like(forward.old_logprobs)
    reverse = config.kl.direction == "reference_policy"
    if config.kl.estimator == "exact":
        divergence = forward.ref_kl if forward.reverse_ref_kl is None else forward.reverse_ref_kl
    else:
        divergence = kl.estimate(config.kl.estimator, forward.old_logprobs - forward.ref_logprobs, reverse)
    return charge_penalties(divergence * kl_coef, rollout.lengths, rollout.word_ids(), config.kl.charge)


def _shaping(config: RunConfig, task: Task, rollout: Rollout, ranks: Ranks) -> Tensor:
    texts, answers = rollout.prompts.texts, rollout.prompts.answers
    rows = zip(texts, rollout.responses, answers, rollout.places, strict=True)

    def ask() -> list[float]:
        parts = [potentials(task.judge, prompt, said, answer, at.char_start) for prompt, said, answer, at in rows]
        return [phi for part in parts for phi in part]

    assert isinstance(config.advantages, GaeAdvantages)
    phi = torch.tensor(ranks.first(ask), dtype=torch.float64)
    return shaping_rewards(phi, rollout.lengths, config.advantages.gamma)


def compute_advantages(config: RunConfig, rollout: Rollout, forward: ForwardPass, rewards: Rewards) -> Advantages:
    """Advantages and value targets; whitening is over all tokens of the iteration."""
    settings = config.advantages
    if isinstance(settings, GroupAdvantages):
        by_response = group_advantages(rewards.scores.tolist(), rollout.prompts.keys, settings.scale)
        raw = torch.repeat_interleave(torch.tensor(by_response, dtype=torch.float32), rollout.lengths)
        return Advantages(raw_advantages=raw, advantages=raw, returns=None)
    assert forward.values is not None
    raw = gae(
        rewards.rewards, forward.values, rollout.lengths, forward.final_values, settings.gamma, settings.gae_lambda
    )
    advantages = raw if settings.whiten == "none" else whiten(raw, shift=settings.whiten == "full")
    return Advantages(raw_advantages=raw, advantages=advantages, returns=raw + forward.values)


def first_controls(config: RunConfig) -> Controls:
    """The coefficients of the first iteration."""
    objective = config.ppo.objective
    return Controls(
        kl_coef=0.0 if isinstance(config.kl, NoKL) else config.kl.kl_coef,
        clip_range=objective.clip_range if isinstance(objective, AdaptiveClipObjective) else 0.0,
        penalty_coef=objective.penalty_coef if isinstance(objective, PenaltyObjective) else 0.0,
        returns=ReturnStatistics(),
    )


def next_controls(
    config: RunConfig,
    controls: Controls,
    forward: ForwardPass,
    advantages: Advantages,
    updates: Sequence[MinibatchUpdate],
    sequences: int,
) -> Controls:
    """The coefficients of the next iteration, from what this one measured."""
    controller = FixedController() if isinstance(config.kl, NoKL) else config.kl.controller
    if isinstance(controller, AdaptiveController):
        per_sequence = math.fsum(forward.ref_kl.tolist()) / sequences
        coef = adaptive_kl_coef(controls.kl_coef, per_sequence, controller.target_kl, sequences, controller.horizon)
        controls = replace(controls, kl_coef=coef)
    objective = config.ppo.objective
    if isinstance(objective, AdaptiveClipObjective):
        bounds = objective.clip_range_min, objective.clip_range_max
        clip_range = adaptive_clip_range(controls.clip_range, last_kl(updates), objective.target_kl, *bounds)
        controls = replace(controls, clip_range=clip_range)
    if isinstance(objective, PenaltyObjective) and objective.target_kl is not None:
        coef = adaptive_penalty_coef(controls.penalty_coef, last_kl(updates), objective.target_kl)
        controls = replace(controls, penalty_coef=coef)
    if not isinstance(config.value, NoValue) and config.value.normalize_returns:
        assert advantages.returns is not None
        controls = replace(controls, returns=controls.returns.joined(advantages.returns.tolist()))
    return controls


def last_kl(updates: Sequence[MinibatchUpdate]) -> float:
    """KL(anchor || new), k3, token mean over the last epoch of the policy: how far it has moved, one step short."""
    steps = [(u.epoch, len(u.tokens), u.policy.approx_kl) for u in updates if u.policy is not None]
    last = [(tokens, found) for epoch, tokens, found in steps if epoch == steps[-1][0]]
    return math.fsum(tokens * found for tokens, found in last) / sum(tokens for tokens, _ in last)


def evaluate(config: RunConfig, task: Task, engine: Engine, ranks: Ranks) -> Evaluation:
    """Greedy accuracy and mean score on the held-out prompts."""
    problems: Sequence[Problem] = task.problems.held_out
    requests = [Request(task.prompt_ids[p.key], 0) for p in problems]
    completions = _generate(config, engine, requests, sampling_of(config, greedy=True), ranks)
    samples = Samples(
        [p.prompt for p in problems],
        [decode(task.tokenizer, c.response_ids) for c in completions],
        [p.answer for p in problems],
        [c.finish_reason == "stop" for c in completions],
        [len(c.response_ids) for c in completions],
    )
    prompt_ids = [task.prompt_ids[p.key] for p in problems]
    judged = _judge(config, task, prompt_ids, [c.response_ids for c in completions], samples, ranks)
    return Evaluation(sum(judged.correct) / len(judged.correct), sum(judged.scores) / len(judged.scores))
