"""Draw random batches for the trial of the user's functions, divide them into calls, and make extreme tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from ppo_repro.base.ranks import Ranks
from ppo_repro.base.seeding import bell, permutation, words
from ppo_repro.config.algorithm import NoValue
from ppo_repro.config.run import RunConfig
from ppo_repro.ppo.log_ratios import LOG_RATIOS, extreme_logprobs
from ppo_repro.ppo.objectives import probability_ratios
from ppo_repro.ppo.own_batches import AdvantageBatch, ObjectiveBatch, ScoreBatch, Tokens

MOST_TOKENS = 1 << 19  # the full responses of a batch have at most so many tokens, or are one response
MOST_CALLS = 12  # the first 12 calls of a layout are tried, and up to 12 others
FEW, SHORT = 2, 40  # a small batch has 2 full responses of at most 40 tokens
SIZES = torch.tensor([1.0, 1 / 16, 4.0])  # scales; in a column all numbers of a response have one scale
OLD_LOGPROBS = ("anchor_logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs")


def drawn_iteration(config: RunConfig) -> ObjectiveBatch:
    """Draw the tokens of an iteration."""
    return drawn(config, config.sequences_per_iteration, config.rollout.max_response_tokens)


def drawn_few(config: RunConfig) -> ObjectiveBatch:
    """Draw a few short responses."""
    return drawn(config, FEW, min(SHORT, config.rollout.max_response_tokens))


def drawn(config: RunConfig, full: int, longest: int) -> ObjectiveBatch:
    """Draw short responses, with 1, 2, 4, ... tokens, and full responses, as many as MOST_TOKENS allow.

    The numbers of one response resemble each other more than the numbers of different responses. So the statistics of
    few responses differ much from the statistics of all responses.

    Args:
        config: gives the number of samples of a prompt, and the denominator of the ratios.
        longest: the full length, in tokens.
    """
    samples, short = config.rollout.samples_per_prompt, [1 << k for k in range((longest - 1).bit_length())]
    count = len(short) + min(full, max(MOST_TOKENS // longest, 1))
    lengths = torch.tensor([*short, *[longest] * (count - len(short))])
    n, responses = int(lengths.sum()), torch.repeat_interleave(torch.arange(count), lengths)

    def column(name: str, scale: float) -> Tensor:
        of_tokens, of_responses = bell(n, "trial", name), bell(count, "trial", name, "responses")
        sizes = SIZES[torch.from_numpy((words(count, "trial", name, "sizes") % len(SIZES)).astype("int64"))]
        return (torch.from_numpy(of_tokens + of_responses[responses]) * sizes[responses] * scale).to(torch.float32)

    rollout = -column("rollout", 1.0).abs() - 1.0
    old = rollout if config.ppo.ratio_anchor == "rollout" else rollout + column("old", 0.1)
    anchor = rollout if config.ppo.ratio_anchor == "rollout" else old
    new = anchor + column("new", 0.2)
    advantages = column("advantages", 1.0)
    advantages[5::11] = 0.0
    kept = 1.0 + column("corrections", 0.3)
    return ObjectiveBatch(
        new_logprobs=new,
        entropies=column("entropies", 0.5).abs(),
        ratios=probability_ratios(new, anchor),
        anchor_logprobs=anchor,
        old_logprobs=old,
        rollout_logprobs=rollout,
        ref_logprobs=rollout + column("ref", 0.3),
        advantages=advantages,
        corrections=torch.where(kept < 0.5, 0.0, kept),
        responses=responses,
        groups=(responses // samples).clamp(max=max(count // samples, 1) - 1),  # the last one gets the rest
        positions=torch.arange(n) - (torch.cumsum(lengths, 0) - lengths)[responses],
        lengths=lengths[responses],
    )


def layouts(config: RunConfig, drawn: ObjectiveBatch) -> Iterator[tuple[str, list[slice]]]:
    """Yield the name of each layout with the tokens of some of its calls. The calls of `ranks 2` have all tokens."""
    ends = [0, *torch.cumsum(drawn.response_lengths, 0).tolist()]
    count, configured = len(ends) - 1, config.layout.update_micro_batch
    for size in sorted({configured, *(1 << k for k in range(count.bit_length()))}):
        if 0 < size < count:
            starts = range(0, count, size)
            others = permutation(len(starts), "trial", "calls", size)[:MOST_CALLS].tolist()
            chosen = {*range(min(MOST_CALLS, len(starts))), *others}
            calls = [slice(ends[starts[i]], ends[min(starts[i] + size, count)]) for i in sorted(chosen)]
            yield f"micro batch {size}", calls
    halves = [Ranks(rank, 2).mine(count) for rank in range(2)]
    yield "ranks 2", [slice(ends[half.start], ends[half.stop]) for half in halves if half]


def extremes(batch: ObjectiveBatch) -> Iterator[tuple[str, ObjectiveBatch]]:
    """Yield a description and the batch with one extreme token: log-ratios near 0 or large, advantages of both signs.

    With the largest ratios, near the end of float32, the advantages are small, so that a loss may multiply by 1000.
    """
    token = len(batch.responses) // 2
    for x in LOG_RATIOS:
        new, old = extreme_logprobs(x)
        size = 1.0 if x < 88.0 else 1e-3
        for advantage in (size, -size, 0.0):
            values = {"new_logprobs": new, "advantages": advantage, **dict.fromkeys(OLD_LOGPROBS, old)}
            columns = {name: getattr(batch, name).clone() for name in values}
            for name, value in values.items():
                columns[name][token] = value
            yield f"log-ratio {x:g}, advantage {advantage:g}", replace(batch, **columns)


def reward_batches(config: RunConfig) -> Iterator[AdvantageBatch]:
    """Yield batches for advantages: random rewards, and few equal and few large rewards."""
    tokens, few = drawn_iteration(config), drawn_few(config)
    yield with_rewards(config, tokens, tokens.advantages)
    yield with_rewards(config, few, torch.ones_like(few.advantages))
    yield with_rewards(config, few, few.advantages * 1e6)


def with_rewards(config: RunConfig, tokens: ObjectiveBatch, rewards: Tensor) -> AdvantageBatch:
    """Return drawn tokens as a batch for advantages."""
    return AdvantageBatch(
        **_about(tokens),
        rewards=rewards,
        values=None if isinstance(config.value, NoValue) else tokens.entropies,
        scores=tokens.response_sums(rewards).to(torch.float64),
    )


def score_batches(config: RunConfig) -> Iterator[ScoreBatch]:
    """Yield batches for a placement: random scores, and few scores that are all 0."""
    for batch, scale in ((drawn_iteration(config), 1.0), (drawn_few(config), 0.0)):
        scores = batch.response_sums(batch.advantages).to(torch.float64)
        yield ScoreBatch(
            **_about(batch),
            scores=scores * scale,
            is_finished=scores > 0,
            token_ids=batch.positions,
            words=batch.positions // 2,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
            entropies=batch.entropies,
        )


def _about(tokens: Tokens) -> dict[str, Tensor]:
    return {field.name: getattr(tokens, field.name) for field in fields(Tokens)}
