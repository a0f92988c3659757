"""Answers of the engine to problems: from which distribution, with an environment or without, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppo_repro.buffers import Episode
from ppo_repro.config.mismatch import MismatchConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Completion, Engine, Request, Sampling
from ppo_repro.stages.prompts import Task
from ppo_repro.tasks.dialogue import Conversations
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.tokenizer import decode


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
        token_bias=config.mismatch.sampler.token_bias or 0.0,
        bias_seed=config.seed,
        routes=config.asks_for_routes,
        top_logits=config.records.top_logits,
    )


@dataclass(frozen=True)
class Sampled:
    """How some responses are sampled: from which distribution, and with which seed each."""

    sampling: Sampling
    seeds: Sequence[int]


def require_undisturbed(config: RunConfig) -> None:
    """Raise UserError where the configuration makes sampler and trainer differ, which hides their real mismatch."""
    sigma = config.rollout.mismatch_sigma
    if sigma is not None:
        raise UserError(
            f"rollout.mismatch_sigma = {sigma}: must be null here, where sampler and trainer are compared; remove it"
        )
    if config.mismatch != MismatchConfig():
        raise UserError("mismatch: must be empty here, where sampler and trainer are compared; remove the section")


@dataclass(frozen=True)
class Answered:
    """A completion as text."""

    completion: Completion
    text: str  # of all its tokens, without special ones
    episode: Episode | None  # None where every episode is one turn

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens after the prompt."""
        return self.completion.response_ids if self.episode is None else self.episode.ids


def generate(
    config: RunConfig, task: Task, engine: Engine, problems: Sequence[Problem], sampled: Sampled, ranks: Ranks
) -> list[Answered]:
    """One answer to each problem, in their order; each rank generates its share, its environment's turns included."""
    mine = ranks.mine(len(problems))
    requests = [Request(task.prompt_ids[problems[i].key], sampled.seeds[i]) for i in mine]
    if task.environment is None and not config.rollout.stop:
        completions = engine.generate(requests, sampled.sampling)
        return ranks.gather([Answered(c, decode(task.tokenizer, c.response_ids), None) for c in completions])
    conversations = Conversations(
        task.tokenizer,
        config.rollout.stop,
        task.environment,
        [problems[i] for i in mine],
        config.task.turns,
        config.rollout.max_response_tokens,
        config.task.chat_template,
    )
    completions = engine.generate(requests, sampled.sampling, conversations)
    answers = [_answered(task, conversations, index, completion) for index, completion in enumerate(completions)]
    return ranks.gather(answers)


def _answered(task: Task, conversations: Conversations, index: int, c: Completion) -> Answered:
    episode = None
    if task.environment is not None:
        episode = Episode(c.episode_ids, c.is_forced, conversations.turns_of(index, c))
    return Answered(c, decode(task.tokenizer, c.response_ids if episode is None else episode.ids), episode)


def episodes_of(answers: Sequence[Answered]) -> tuple[Episode, ...] | None:
    """The episodes of all answers; None where every episode is one turn."""
    found = tuple(a.episode for a in answers if a.episode is not None)
    return found or None
