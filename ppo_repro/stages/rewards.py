"""Stages `Rewards`, `Advantages` and `Evaluation`: the worth of responses.

Rewards: judge the responses, place the scores on tokens, charge the KL penalty, whiten. Advantages: compute each
token's advantage and value target. Evaluation: judge greedy responses to the held-out prompts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ppo_repro.base.ranks import Ranks
from ppo_repro.buffers import Advantages, Episode, Evaluation, ForwardPass, Rewards, Rollout
from ppo_repro.config.algorithm import AdvantagesConfig, GaeAdvantages, GroupAdvantages, KLConfig, KLInReward
from ppo_repro.config.layout import LayoutConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tasks import ColumnAdditionTask, StepsReward
from ppo_repro.models.reward_model import reward_scores
from ppo_repro.numerics.network import forget_packed
from ppo_repro.ppo import kl
from ppo_repro.ppo.advantages import gae, group_advantages, whiten
from ppo_repro.ppo.own_batches import AdvantageBatch, ScoreBatch
from ppo_repro.ppo.rewards import charge_penalties, place_scores, token_rewards
from ppo_repro.sampler import Sampler
from ppo_repro.stages.rollout import Task, generate, known, sampling_of
from ppo_repro.tasks.problems import Problem, column_steps
from ppo_repro.tasks.rewards import Judgement, Sample, check_functions, judge_samples, right_steps
from ppo_repro.tasks.tokenizer import decode, full_text
from ppo_repro.user.functions import BUILT_IN, Functions

CHECKED = 16  # responses; they include all responses to a prompt if it has so many


def judge(
    layout: LayoutConfig,
    task: Task,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    ranks: Ranks,
) -> Judgement:
    """Judge responses. Each rank runs the reward model on its responses. One rank computes everything else.

    Args:
        prompts: [B] token ids, ragged.
        responses: [B] token ids of whole episodes, ragged.
        samples: [B] the same responses as text, for verifiers and the user's functions.
    """
    scores: list[float] = []
    if task.reward_model is not None:
        mine = ranks.mine(len(prompts))
        sequences = [(*prompts[i], *responses[i]) for i in mine]
        my_scores = reward_scores(task.reward_model, sequences, layout.padding, layout.forward_micro_batch)
        forget_packed(task.reward_model)
        scores = ranks.gather(my_scores.tolist())
    return ranks.first(judge_samples, task.judge, samples, scores)


def compute_rewards(
    config: RunConfig, task: Task, rollout: Rollout, forward: ForwardPass, kl_coef: float, ranks: Ranks
) -> Rewards:
    """Judge the responses, place the scores on tokens, charge the KL penalty, whiten."""
    ids = [rollout.whole(sequence) for sequence in range(len(rollout.lengths))]
    samples = samples_of(task, rollout, len(ids))
    judged = judge(config.layout, task, rollout.prompts.prompt_ids, ids, samples, ranks)
    return rewards_from(config, judged, rollout, forward, kl_coef, task.functions)


def check_rewards(task: Task, rollout: Rollout, ranks: Ranks) -> None:
    """Raise UserError if a user's reward or verifier gives one of the first responses two scores.

    Also raise it if a reward compares responses. The start of a run checks these functions on answers. They may be
    wrong only on texts that a model writes.
    """
    rows = [sample.row for sample in samples_of(task, rollout, CHECKED)]
    ranks.first(check_functions, task.judge.called, rows)


def samples_of(task: Task, rollout: Rollout, count: int) -> list[Sample]:
    """Return the first `count` responses of a rollout, at most all, as they are judged."""
    sampled = rollout.sampled()
    return [
        sample_of(
            task,
            rollout.prompts.prompt_key[sequence],
            sampled[sequence],
            rollout.response[sequence],
            rollout.finish_reason[sequence],
            None if rollout.episodes is None else rollout.episodes[sequence],
        )
        for sequence in range(len(rollout.lengths))[:count]
    ]


def sample_of(
    task: Task, key: str, ids: Sequence[int], text: str, finish_reason: str, episode: Episode | None
) -> Sample:
    """Return the part of a response that is judged: the model's own words, with the special tokens that rewards need.

    Args:
        text: of all tokens, the environment's included.
        finish_reason: stop or length.
        episode: all turns; None if the response is one turn.
    """
    turns: Sequence[str] = (text,) if episode is None else episode.turns
    if episode is None and not task.environment.spelled.isdisjoint(ids):
        turns = (decode(task.tokenizer, ids, task.environment.spelled),)
    own = "".join(turns[::2])  # without the environment's
    whole = full_text(task.tokenizer, ids) if any(task.judge.functions) else ""
    return Sample(
        problem=task.problems.by_key[key],
        response=own,
        finished=finish_reason == "stop",
        length=len(ids),
        turns=tuple(turns),
        full_text=whole,
        ids=tuple(ids),
    )


def rewards_from(
    config: RunConfig,
    judged: Judgement,
    rollout: Rollout,
    forward: ForwardPass,
    kl_coef: float,
    functions: Functions = BUILT_IN,
) -> Rewards:
    """Place the scores of a judgement on tokens, charge the KL penalty, whiten.

    Returns rewards of all tokens, float32, and their components.
    """
    scores = torch.tensor(judged.scores, dtype=torch.float64)
    penalties = _kl_penalties(config.kl, rollout, forward, kl_coef, functions)
    placed = _placed_scores(config, scores, rollout, forward, functions)
    raw = token_rewards(placed, penalties)
    whitening = config.reward.whiten
    return Rewards(
        scores=scores,
        score_parts=tuple(tuple(row) for row in judged.term_values),
        is_correct=torch.tensor(judged.correct),
        kl_penalties=penalties,
        placed_scores=placed,
        raw_rewards=raw,
        rewards=raw if whitening == "none" else whiten(raw, shift=whitening == "full"),
    )


def _placed_scores(
    config: RunConfig, scores: Tensor, rollout: Rollout, forward: ForwardPass, functions: Functions
) -> Tensor:
    """Return the scores [B] placed on tokens, [N] float64."""
    at_steps, placement = _step_rewards(config, rollout), config.reward.placement
    runs = at_steps.split(rollout.lengths.tolist())
    # summed in the order of the tokens, because the order of torch's sums depends on the machine
    rest = scores - torch.tensor([reduce(add, run.tolist(), 0.0) for run in runs], dtype=torch.float64)
    if isinstance(placement, str):
        return place_scores(rest, rollout.lengths, rollout.word_ids(), placement) + at_steps
    assert functions.placement is not None
    batch = ScoreBatch(
        **rollout.about_tokens(),
        scores=rest,
        is_finished=torch.tensor([reason == "stop" for reason in rollout.finish_reason]),
        token_ids=rollout.response_ids,
        words=rollout.word_ids(),
        old_logprobs=forward.old_logprobs,
        ref_logprobs=forward.ref_logprobs,
        entropies=forward.entropies,
    )
    return functions.placement.place(batch) + at_steps


def _step_rewards(config: RunConfig, rollout: Rollout) -> Tensor:
    """Return the scores of right steps, placed at the ends of the steps, [N] float64."""
    rewards = torch.zeros(len(rollout.response_ids), dtype=torch.float64)
    weight = sum(t.weight for t in config.reward.terms if isinstance(t, StepsReward) and t.placement == "step_ends")
    if not weight or not isinstance(config.task, ColumnAdditionTask):
        return rewards
    texts = zip(rollout.starts().tolist(), rollout.prompts.prompt, rollout.response, rollout.spans, strict=True)
    for start, prompt, response, spans in texts:
        steps = column_steps(prompt, config.task.base)
        for end in right_steps(response, steps):
            rewards[start + bisect_left(spans.char_end, end)] += weight / len(steps)
    return rewards


def _kl_penalties(
    charged: KLConfig, rollout: Rollout, forward: ForwardPass, kl_coef: float, functions: Functions
) -> Tensor:
    """Return kl_coef times the KL estimate on the charged tokens, [N] float32; 0 if the reward has no KL."""
    if not isinstance(charged, KLInReward):
        return torch.zeros_like(forward.old_logprobs)
    reverse = charged.direction == "reference_policy"
    if functions.estimator is not None:
        divergence = functions.estimator.estimate(forward.old_logprobs, forward.ref_logprobs)
    elif charged.estimator == "exact":
        exact = forward.reverse_ref_kl if reverse else forward.ref_kl
        assert exact is not None
        divergence = exact
    else:
        assert isinstance(charged.estimator, str)
        divergence = kl.estimate(charged.estimator, forward.old_logprobs - forward.ref_logprobs, reverse)
    return charge_penalties(divergence * kl_coef, rollout.lengths, rollout.word_ids(), charged.charge)


def compute_advantages(
    settings: AdvantagesConfig,
    rollout: Rollout,
    forward: ForwardPass,
    rewards: Rewards,
    functions: Functions = BUILT_IN,
) -> Advantages:
    """Compute advantages and value targets of N tokens, float32. Whitening is over all tokens of the iteration."""
    if isinstance(settings, GroupAdvantages):
        by_response = group_advantages(rewards.scores.tolist(), rollout.prompts.prompt_key, settings.scale)
        raw = torch.repeat_interleave(torch.tensor(by_response, dtype=torch.float32), rollout.lengths)
        return Advantages(raw_advantages=raw, advantages=raw, returns=None)
    values = forward.values
    if functions.advantages is not None:
        raw = functions.advantages.advantages(_advantage_batch(rollout, rewards, values))
    else:
        assert isinstance(settings, GaeAdvantages)
        assert values is not None
        ended = torch.zeros(len(rollout.lengths))  # nothing follows a response, cut at the length limit or not
        raw = gae(rewards.rewards, values, rollout.lengths, ended, settings.gamma, settings.gae_lambda)
    advantages = raw if settings.whiten == "none" else whiten(raw, shift=settings.whiten == "full")
    return Advantages(raw_advantages=raw, advantages=advantages, returns=None if values is None else raw + values)


def _advantage_batch(rollout: Rollout, rewards: Rewards, values: Tensor | None) -> AdvantageBatch:
    return AdvantageBatch(
        **rollout.about_tokens(),
        rewards=rewards.rewards,
        values=values,
        scores=rewards.scores,
    )


def evaluate(config: RunConfig, task: Task, sampler: Sampler, ranks: Ranks) -> Evaluation:
    """Sample greedy responses to the held-out prompts, and judge them."""
    problems: Sequence[Problem] = task.problems.held_out
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
