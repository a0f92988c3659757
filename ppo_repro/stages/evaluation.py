"""Stage `Evaluation`: greedy decoding of the held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from ppo_repro.buffers import Evaluation
from ppo_repro.config.run import RunConfig
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Engine, Request
from ppo_repro.stages.prompts import Task
from ppo_repro.stages.rewards import judge
from ppo_repro.stages.rollout import generate, sampling_of
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.rewards import Samples
from ppo_repro.tasks.tokenizer import decode


def evaluate(config: RunConfig, task: Task, engine: Engine, ranks: Ranks) -> Evaluation:
    """Greedy accuracy and mean score on the held-out prompts."""
    problems: Sequence[Problem] = task.problems.held_out
    requests = [Request(task.prompt_ids[p.key], 0) for p in problems]
    completions = generate(config, engine, requests, sampling_of(config, greedy=True), ranks)
    samples = Samples(
        [p.key for p in problems],
        [p.prompt for p in problems],
        [decode(task.tokenizer, c.response_ids) for c in completions],
        [p.answer for p in problems],
        [c.finish_reason == "stop" for c in completions],
        [len(c.response_ids) for c in completions],
    )
    prompt_ids = [task.prompt_ids[p.key] for p in problems]
    judged = judge(config, task, prompt_ids, [c.response_ids for c in completions], samples, ranks)
    return Evaluation(sum(judged.correct) / len(judged.correct), sum(judged.scores) / len(judged.scores))
