"""Stages `Prompts` and `Rollout`: the prompts of an iteration, and one sampled response to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import compress
from typing import TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_repro.base.ranks import Ranks
from ppo_repro.base.seeding import sample_seed
from ppo_repro.buffers import Episode, Prompts, Rollout, Spans
from ppo_repro.config.run import RunConfig
from ppo_repro.sampler import Completion, Request, Sampler, Sampling
from ppo_repro.tasks.dialogue import Conversation, Environment
from ppo_repro.tasks.problems import Problem, Split, choose
from ppo_repro.tasks.rewards import Judge
from ppo_repro.tasks.tokenizer import decode, spans
from ppo_repro.user.functions import BUILT_IN, Functions

T = TypeVar("T")


def as_sampled(rollout: Rollout) -> Rollout:
    """Return the rollout itself."""
    return rollout


@dataclass(frozen=True)
class Task:
    """The prompts of a run, the functions that score responses, and the user's functions that the loop calls."""

    problems: Split
    prompt_ids: dict[str, tuple[int, ...]]  # by problem key
    judge: Judge
    reward_model: PreTrainedModel | None  # frozen; None if no reward term is a model
    tokenizer: PreTrainedTokenizerBase
    environment: Environment
    functions: Functions = BUILT_IN
    received: Callable[[Rollout], Rollout] = as_sampled  # as the trainer gets it: `mismatch.trainer` may change it


def choose_prompts(config: RunConfig, task: Task, iteration: int) -> Prompts:
    """Choose the prompts of an iteration, each `samples_per_prompt` times. Every response has its own seed."""
    problems = choose(task.problems.train, config.rollout.prompts_per_iteration, config.seed, iteration)
    # a small task can draw a prompt twice in one iteration; the numbers of its samples then continue
    entries: list[tuple[Problem, int]] = []
    counts: dict[str, int] = {}
    for problem in problems:
        first = counts.get(problem.key, 0)
        counts[problem.key] = first + config.rollout.samples_per_prompt
        entries += [(problem, first + i) for i in range(config.rollout.samples_per_prompt)]
    return Prompts(
        prompt_key=tuple(p.key for p, _ in entries),
        sample_index=tuple(i for _, i in entries),
        seed=tuple(sample_seed(config.seed, iteration, p.key, i) for p, i in entries),
        prompt=tuple(p.prompt for p, _ in entries),
        answer=tuple(p.answer for p, _ in entries),
        prompt_ids=tuple(task.prompt_ids[p.key] for p, _ in entries),
    )


def sampling_of(config: RunConfig, greedy: bool = False) -> Sampling:
    """Return the sampling distribution. Greedy evaluation has no top-k and no top-p."""
    rollout = config.rollout
    if greedy:
        return Sampling(1.0, 0, 1.0, rollout.max_response_tokens, greedy=True)
    return Sampling(
        rollout.temperature,
        rollout.top_k,
        rollout.top_p,
        rollout.max_response_tokens,
        routes=config.asks_for_routes,
    )


@dataclass(frozen=True)
class Answered:
    """A completion with its text and, in episodes of several turns, the environment's part."""

    completion: Completion
    text: str  # of all its tokens, without special ones
    episode: Episode | None  # None if every episode is one turn

    @property
    def ids(self) -> tuple[int, ...]:
        """Return all tokens after the prompt, the environment's included."""
        return self.completion.response_ids if self.episode is None else self.episode.ids


def generate(
    task: Task,
    sampler: Sampler,
    problems: Sequence[Problem],
    sampling: Sampling,
    seeds: Sequence[int],
    ranks: Ranks,
) -> list[Answered]:
    """Generate one answer to each problem, in their order.

    Each rank generates some answers, with the environment's turns, and returns all answers.
    """
    mine = ranks.mine(len(problems))
    environment = task.environment
    is_one_turn = environment.step is None and not environment.stop
    conversations = [None if is_one_turn else Conversation(environment, problems[i]) for i in mine]
    prompts = zip(mine, conversations, strict=True)
    requests = [Request(task.prompt_ids[problems[i].key], seeds[i], conversation) for i, conversation in prompts]
    answers = []
    for c, conversation in zip(sampler.generate(requests, sampling), conversations, strict=True):
        if conversation is None or environment.step is None:
            text = decode(task.tokenizer, c.response_ids) if c.encoded_again is None else c.encoded_again.text
            answers.append(Answered(c, text, None))
        else:
            episode = Episode(c.episode_ids, c.is_forced, conversation.turns_of(c))
            answers.append(Answered(c, decode(task.tokenizer, episode.ids), episode))
    return ranks.gather(answers)


def known(name: str, values: Sequence[T | None]) -> tuple[T, ...] | None:
    """Return the values of all responses; None if no response has one. Raises ValueError if only some have one."""
    present = tuple(value for value in values if value is not None)
    if present and len(present) < len(values):
        raise ValueError(
            f"{name}: the sampler has it for {len(present)} of {len(values)} responses; must be all or none"
        )
    return present or None


def roll_out(config: RunConfig, task: Task, sampler: Sampler, prompts: Prompts, ranks: Ranks) -> Rollout:
    """Sample one response to every prompt. Each process samples a part, and every process returns all responses."""
    problems = [task.problems.by_key[key] for key in prompts.prompt_key]
    answers = generate(task, sampler, problems, sampling_of(config), prompts.seed, ranks)
    completions = [answer.completion for answer in answers]
    encoded_again = known("encoded_again", [c.encoded_again for c in completions])
    return Rollout(
        prompts=prompts,
        response_ids=torch.tensor([token for c in completions for token in c.response_ids], dtype=torch.int64),
        lengths=torch.tensor([len(c.response_ids) for c in completions]),
        temperature=config.rollout.temperature,
        rollout_logprobs=torch.cat([c.logprobs for c in completions]),
        log_kept_mass=torch.cat([c.log_kept_mass for c in completions]),
        kept_tokens=torch.cat([c.kept_tokens for c in completions]),
        finish_reason=tuple(c.finish_reason for c in completions),
        server=tuple(c.server for c in completions),
        latency=tuple(c.latency for c in completions),
        response=tuple(answer.text for answer in answers),
        spans=tuple(_spans(task, answer) for answer in answers),
        episodes=known("episodes", [answer.episode for answer in answers]),
        rollout_policy_versions=known("policy_versions", [c.policy_versions for c in completions]),
        sampled_ids=None if encoded_again is None else tuple(encoded.sampled_ids for encoded in encoded_again),
        is_as_sampled=None if encoded_again is None else tuple(encoded.is_as_sampled for encoded in encoded_again),
        routes=known("routes", [c.routes for c in completions]),
    )


def _spans(task: Task, answer: Answered) -> Spans:
    """Find the position of each sampled token in the text of all tokens, the environment's included."""
    of_all = spans(task.tokenizer, answer.ids, answer.text)
    if answer.episode is None:
        return of_all
    sampled = [not forced for forced in answer.episode.is_forced]
    return Spans(*(list(compress(getattr(of_all, column.name), sampled)) for column in fields(Spans)))
