"""Stage `Evaluation`: greedy responses to the held-out prompts, judged like the sampled ones."""

from __future__ import annotations

from ppo_repro.base.ranks import Ranks
from ppo_repro.buffers import Evaluation
from ppo_repro.config.run import RunConfig
from ppo_repro.sampler import Sampler
from ppo_repro.stages.rewards import judge, sample_of
from ppo_repro.stages.rollout import Task, generate, known, sampling_of


def evaluate(config: RunConfig, task: Task, sampler: Sampler, ranks: Ranks) -> Evaluation:
    """Sample greedy responses to the held-out prompts, and judge them."""
    problems = task.problems.held_out
    answers = generate(task, sampler, problems, sampling_of(config, greedy=True), [0] * len(problems), ranks)
    completions = [answer.completion for answer in answers]
    episodes = known("episodes", [answer.episode for answer in answers])
    samples = [
        sample_of(
            task, p.key, answer.completion.response_ids, answer.text, answer.completion.finish_reason, answer.episode
        )
        for p, answer in zip(problems, answers, strict=True)
    ]
    prompt_ids = tuple(task.prompt_ids[p.key] for p in problems)
    judged = judge(config.layout, task, prompt_ids, [answer.ids for answer in answers], samples, ranks)
    return Evaluation(
        prompt_key=tuple(p.key for p in problems),
        prompt=tuple(p.prompt for p in problems),
        answer=tuple(p.answer for p in problems),
        prompt_ids=prompt_ids,
        response_ids=tuple(tuple(c.response_ids) for c in completions),
        response=tuple(answer.text for answer in answers),
        finish_reason=tuple(c.finish_reason for c in completions),
        scores=tuple(judged.scores),
        score_parts=tuple(tuple(row) for row in judged.term_values),
        is_correct=tuple(judged.correct),
        episodes=episodes,
    )
