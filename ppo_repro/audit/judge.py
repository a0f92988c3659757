"""Which side is wrong, and why: each side's distance from the exact model, and what leaves least of it.

A side is right where its rms distance is at most 10 times that of stock float32 on the same tokens. Else every
combination of conditions is computed on some of the tokens, and the one is taken that minimises

    log(mean of what it leaves squared + floor^2) + log 4 x (number of deviations),

so one more deviation has to halve what is left. It explains the distance if it leaves at most a tenth of it (half of it
where 16-bit weights are part of it: the order of their additions is not known), or no more than float32 rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.accuracy.scores import policy_scores, stock_scores
from ppo_repro.audit.conditions import AS_DUMPED, HALF, Subject, logprobs, text_of
from ppo_repro.audit.dump import Response
from ppo_repro.audit.trials import Entries, Settings, Trials, Tried, first, rms, run_trials
from ppo_repro.errors import UserError
from ppo_repro.models.networks import make_policy

RIGHT = 10.0  # times stock float32's distance; other kernels of float32 are 1 to 3 times as far
LEFT, LEFT_OF_HALF = 0.1, 0.5
PER_DEVIATION = math.log(4.0)
FITTED = 0.5  # deviations more for a temperature that is fitted: it fits noise, too
TRIED_TOKENS = 512
SURE = 0.99  # a token of this probability may have a log-prob that rounds to 0
SHOWN = 8  # combinations that a verdict lists


@dataclass(frozen=True)
class Side:
    """The verdict about sampler or trainer. Distances are |its log-prob - the exact one| in nats."""

    name: str
    tokens: int  # with a finite log-prob
    empty: int  # not finite, or exactly 0 where the exact probability is below 0.99
    rms: float
    largest: float
    mean: float  # signed
    is_right: bool
    cause: str  # "" where it is right
    left: float  # rms of what the cause leaves, on the tokens that were tried
    tried: tuple[Tried, ...]  # the best first


@dataclass(frozen=True)
class Scored:
    """All tokens that count, one entry each, in order; float64, nats."""

    row: Tensor
    position: Tensor
    token_id: Tensor
    exact: Tensor
    sampler: Tensor
    trainer: Tensor


@dataclass(frozen=True)
class Audit:
    """Both verdicts, and the tokens they are about."""

    responses: int
    tried_tokens: int
    floor: float  # rms distance of stock float32, nats
    sampler: Side
    trainer: Side
    scored: Scored


@torch.no_grad()
def audit(subject: Subject, responses: Sequence[Response], settings: Settings) -> Audit:
    """Judge both sides of a dump. UserError where the model cannot have been the one of the dump."""
    _check(subject, responses)
    policy, exact, floors = make_policy(subject.model, "exact", subject.max_context), [], []
    for response in responses:
        text = text_of(response, AS_DUMPED, None)
        found = logprobs(policy_scores(policy, text).logits, response.response_ids, settings.temperature, None)
        stock = logprobs(stock_scores(subject.model, text).logits, response.response_ids, settings.temperature, None)
        exact.append(found)
        floors.append(stock - found)
    floor = max(rms(torch.cat(floors)), 2.0**-24)
    sides = {name: _entries(name, responses, exact) for name in ("sampler", "trainer")}
    wrong = {name: e for name, e in sides.items() if rms(_distances(e, exact)) > RIGHT * floor}
    some = first(responses, TRIED_TOKENS)
    head = {name: Entries(e.values[: len(some)], e.usable[: len(some)]) for name, e in wrong.items()}
    trials = run_trials(subject, some, exact[: len(some)], head, settings)
    verdicts = {name: _verdict(name, e, exact, responses, trials, floor, settings) for name, e in sides.items()}
    return Audit(
        len(responses),
        sum(len(r.response_ids) for r in some),
        floor,
        verdicts["sampler"],
        verdicts["trainer"],
        _scored(responses, exact, sides["sampler"].values, sides["trainer"].values),
    )


def _check(subject: Subject, responses: Sequence[Response]) -> None:
    vocabulary = subject.model.config.vocab_size
    for r in responses:
        worst = max(*r.prompt_ids, *r.response_ids)
        if worst >= vocabulary:
            raise UserError(
                f"row {r.row}: token {worst} is not in the model's vocabulary of {vocabulary}; another model"
            )


def _entries(name: str, responses: Sequence[Response], exact: Sequence[Tensor]) -> Entries:
    values = [torch.tensor(getattr(response, name)).double() for response in responses]
    empty = [~v.isfinite() | ((v == 0) & (e < math.log(SURE))) for v, e in zip(values, exact, strict=True)]
    return Entries(values, [torch.tensor(r.counts) & ~gone for r, gone in zip(responses, empty, strict=True)])


def _distances(side: Entries, exact: Sequence[Tensor]) -> Tensor:
    return torch.cat([(v - e)[u] for v, e, u in zip(side.values, exact, side.usable, strict=True)])


def _verdict(
    name: str,
    side: Entries,
    exact: Sequence[Tensor],
    responses: Sequence[Response],
    trials: Trials,
    floor: float,
    settings: Settings,
) -> Side:
    distance = _distances(side, exact)
    counted = sum(int(r.counts.sum()) for r in responses)
    empty = counted - distance.numel()

    def cost(t: Tried) -> float:
        fitted = t.conditions.temperature not in (settings.temperature, 1.0)
        deviations = len(t.conditions.deviations(settings.temperature)) + FITTED * fitted
        return math.log(t.left**2 + floor**2) + PER_DEVIATION * deviations

    tried = trials.by_side.get(name, ())
    ranked = tuple(sorted(tried, key=cost)[:SHOWN])
    cause, left = "", rms(distance)
    if ranked:
        cause, left = _cause(ranked[0], tried, trials.halves, floor, settings), ranked[0].left
    if empty:
        cause = " and ".join(filter(None, [f"{empty:,} of {counted:,} tokens have no log-prob or a 0", cause]))
    return Side(
        name=name,
        tokens=distance.numel(),
        empty=empty,
        rms=rms(distance),
        largest=float(distance.abs().max()) if distance.numel() else math.nan,
        mean=float(distance.mean()) if distance.numel() else math.nan,
        is_right=not cause,
        cause=cause,
        left=left,
        tried=ranked,
    )


def _cause(best: Tried, tried: Sequence[Tried], halves: Mapping[str, float], floor: float, settings: Settings) -> str:
    plain = next(t.left for t in tried if not t.conditions.deviations(settings.temperature))
    found = best.conditions.deviations(settings.temperature)
    share = LEFT_OF_HALF if best.conditions.inputs.weights in HALF else LEFT
    if found and (best.left <= share * plain or best.left <= RIGHT * floor):
        return " and ".join(found)
    for name, size in halves.items():
        if size / 3 <= plain <= 3 * size:
            return f"about as far as {name} rounding is ({size:.2g} nats rms), in other digits"
    return "unknown"


def _scored(
    responses: Sequence[Response], exact: Sequence[Tensor], sampler: Sequence[Tensor], trainer: Sequence[Tensor]
) -> Scored:
    counts = [torch.tensor(r.counts) for r in responses]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([p[c] for p, c in zip(parts, counts, strict=True)])

    return Scored(
        joined([torch.full((len(r.response_ids),), r.row) for r in responses]),
        joined([torch.arange(len(r.response_ids)) for r in responses]),
        joined([torch.tensor(r.response_ids) for r in responses]),
        joined(exact),
        joined(sampler),
        joined(trainer),
    )
