"""What is asked in an iteration, and how it is judged."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_repro.buffers import (
    Prompts,
)
from ppo_repro.config.run import RunConfig
from ppo_repro.seeding import sample_seed
from ppo_repro.tasks.problems import Problem, Split, choose
from ppo_repro.tasks.rewards import Judge


@dataclass(frozen=True)
class Task:
    """What is asked and how it is judged."""

    problems: Split
    prompt_ids: dict[str, tuple[int, ...]]  # by problem key
    judge: Judge
    reward_model: PreTrainedModel | None  # frozen; None where no term of the reward is one
    tokenizer: PreTrainedTokenizerBase


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
