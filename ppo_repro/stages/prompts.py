"""Stage `Prompts`: the prompts of an iteration. Also the task they come from."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_repro.buffers import Prompts
from ppo_repro.config.run import RunConfig
from ppo_repro.seeding import sample_seed
from ppo_repro.tasks.problems import Problem, Split, choose
from ppo_repro.tasks.rewards import Judge
from ppo_repro.tasks.sources import PythonFile


@dataclass(frozen=True)
class Task:
    """The prompts of a run, and what scores the responses."""

    problems: Split
    prompt_ids: dict[str, tuple[int, ...]]  # by problem key
    judge: Judge
    reward_model: PreTrainedModel | None  # frozen; None where no reward term is a model
    tokenizer: PreTrainedTokenizerBase
    environment: PythonFile | None = None  # None where every episode is one turn of the model
    spelled: frozenset[int] = frozenset()  # special tokens that rewards and stop texts see as text


def choose_prompts(config: RunConfig, task: Task, iteration: int) -> Prompts:
    """The prompts of an iteration, each `samples_per_prompt` times; every response has its own seed."""
    problems = choose(task.problems.train, config.rollout.prompts_per_iteration, config.seed, iteration)
    # a small task can draw a prompt twice in one iteration; the numbers of its samples then continue
    entries: list[tuple[Problem, int]] = []
    counts: dict[str, int] = {}
    for problem in problems:
        first = counts.get(problem.key, 0)
        counts[problem.key] = first + config.rollout.samples_per_prompt
        entries += [(problem, first + i) for i in range(config.rollout.samples_per_prompt)]
    return Prompts(
        keys=tuple(p.key for p, _ in entries),
        sample_indices=tuple(i for _, i in entries),
        seeds=tuple(sample_seed(config.seed, iteration, p.key, i) for p, i in entries),
        texts=tuple(p.prompt for p, _ in entries),
        answers=tuple(p.answer for p, _ in entries),
        prompt_ids=tuple(task.prompt_ids[p.key] for p, _ in entries),
    )
