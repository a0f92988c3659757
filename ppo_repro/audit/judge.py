"""Which side is wrong, and why: each side's distance from the model in float64, and what leaves least of it.

A side is right where its rms distance is at most 10 times that of stock float32 on the same tokens. Else combinations
of conditions are computed on some tokens of the responses in which it is wrong, and the best one (`trials`) explains
the distance if it leaves at most a tenth of it (half of it where 16-bit weights are part of it: the order of their
additions is not known), or no more than float32 rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.accuracy import Float64, wide_model
from ppo_repro.audit.conditions import HALF, Settings, Subject, logits_of, logprobs
from ppo_repro.audit.dump import Response
from ppo_repro.audit.trials import Entries, Material, Trials, Tried, rms, run_trials
from ppo_repro.audit.ways import Fed, ways
from ppo_repro.errors import UserError
from ppo_repro.output import say

RIGHT = 10.0  # times stock float32's distance; other kernels of float32 are 1 to 3 times as far
LEFT, LEFT_OF_HALF, LEFT_IN_PART = 0.1, 0.5, 0.5
TRIED_TOKENS, TRIED_INPUTS = 512, 4096  # response tokens, and prompts with them
SURE = 0.99  # a token of this probability may have a log-prob that rounds to 0
SHOWN = 8  # combinations that a verdict lists
UNKNOWN, ROUNDED = "unknown", "about as far as"


@dataclass(frozen=True)
class Side:
    """The verdict about sampler or trainer. Distances are |its log-prob - the model's in float64| in nats."""

    name: str
    tokens: int  # with a finite log-prob
    empty: int  # not finite, or exactly 0 where the model's probability is below 0.99
    rms: float
    largest: float
    mean: float  # signed
    wrong_responses: int  # in which the rms distance is above the limit; 0 where the side is right
    is_right: bool
    cause: str  # "" where it is right
    left: float  # rms of what the cause leaves, on the tokens that were tried
    tried_tokens: int
    tried: tuple[Tried, ...]  # the best first
    given_up: int  # weights and inputs more, of which the first responses left too much


@dataclass(frozen=True)
class Scored:
    """All tokens that count, one entry each, in order; log-probs float64, nats."""

    row: Tensor
    turn: Tensor
    position: Tensor
    token_id: Tensor
    reference: Tensor
    sampler: Tensor
    trainer: Tensor


@dataclass(frozen=True)
class Audit:
    """Both verdicts, and the tokens they are about."""

    responses: int
    floor: float  # rms distance of stock float32, nats
    sampler: Side
    trainer: Side
    scored: Scored


@torch.no_grad()
def audit(subject: Subject, responses: Sequence[Response], settings: Settings) -> Audit:
    """Judge both sides of a dump. UserError where the model cannot have been the one of the dump."""
    _check(subject, responses)
    reference, stock = _scores(subject, responses, settings)
    counts = [torch.tensor(r.counts) for r in responses]
    floor = max(rms(torch.cat([(s - e)[c] for s, e, c in zip(stock, reference, counts, strict=True)])), 2.0**-24)
    sides = {name: _entries(name, responses, reference) for name in ("sampler", "trainer")}
    wrong = {name: _wrong_responses(entries, reference, RIGHT * floor) for name, entries in sides.items()}
    material, entries = _tried_on(subject, responses, reference, floor, settings, sides, wrong)
    if entries:
        say(f"audit: {' and '.join(entries)} wrong; looks for the cause, weights by {len(material.ways)} ways of input")
    trials = run_trials(subject, material, entries)
    distances = {name: torch.cat(_distances(side, reference)) for name, side in sides.items()}
    counted = sum(int(c.sum()) for c in counts)
    tokens = {name: sum(int(u.sum()) for u in side.usable) for name, side in entries.items()}
    verdicts = {
        name: _verdict(name, distances[name], counted, len(wrong[name]), trials, material, tokens.get(name, 0))
        for name in sides
    }
    _check_unexplained(sides, verdicts, floor)
    scored = _scored(responses, reference, sides["sampler"].values, sides["trainer"].values)
    return Audit(len(responses), floor, verdicts["sampler"], verdicts["trainer"], scored)


def _scores(subject: Subject, responses: Sequence[Response], settings: Settings) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs [n] of each response by the unmodified model, in float64 throughout and in float32."""
    wide = wide_model(subject.model)

    def logprobs_of(model: PreTrainedModel, r: Response) -> Tensor:
        logits = logits_of(model, Fed(r.prompt_ids), r)
        return logprobs(logits.double(), r.response_ids, settings.temperature, None)

    with Float64():
        reference = [logprobs_of(wide, r) for r in responses]
    return reference, [logprobs_of(subject.model, r) for r in responses]


def _check(subject: Subject, responses: Sequence[Response]) -> None:
    vocabulary = subject.model.config.vocab_size
    for r in responses:
        worst = max(*r.prompt_ids, *r.response_ids)
        if worst >= vocabulary:
            raise UserError(
                f"row {r.row}: token {worst} is not in the model's vocabulary of {vocabulary}; give the folder of the "
                "model that the dump was made with"
            )


def _check_unexplained(sides: Mapping[str, Entries], verdicts: Mapping[str, Side], floor: float) -> None:
    """UserError where both sides say the same, and it is something else than the model."""
    if any(not side.cause.startswith(UNKNOWN) for side in verdicts.values()):
        return
    apart = rms(_apart(sides["sampler"], sides["trainer"]))
    nearer = min(side.rms for side in verdicts.values())
    if apart <= max(RIGHT * floor, LEFT * nearer):
        raise UserError(
            f"--model: sampler and trainer are {apart:.2g} nats (rms) from each other and {nearer:.2g} from this "
            "model, and no fault explains it; give the folder of the weights that the dump was made with, and its "
            "--temperature"
        )


def _apart(a: Entries, b: Entries) -> Tensor:
    both = zip(a.values, a.usable, b.values, b.usable, strict=True)
    return torch.cat([(x - y)[u & v] for x, u, y, v in both])


def _entries(name: str, responses: Sequence[Response], reference: Sequence[Tensor]) -> Entries:
    values = [torch.tensor(getattr(response, name)).double() for response in responses]
    empty = [~v.isfinite() | ((v == 0) & (e < math.log(SURE))) for v, e in zip(values, reference, strict=True)]
    return Entries(values, [torch.tensor(r.counts) & ~gone for r, gone in zip(responses, empty, strict=True)])


def _distances(side: Entries, reference: Sequence[Tensor]) -> list[Tensor]:
    return [(v - e)[u] for v, e, u in zip(side.values, reference, side.usable, strict=True)]


def _wrong_responses(side: Entries, reference: Sequence[Tensor], limit: float) -> list[int]:
    """Indices of the responses in which a side is wrong; none where it is right over all."""
    distances = _distances(side, reference)
    if rms(torch.cat(distances)) <= limit:
        return []
    return [i for i, distance in enumerate(distances) if rms(distance) > limit]


def _tried_on(
    subject: Subject,
    responses: Sequence[Response],
    reference: Sequence[Tensor],
    floor: float,
    settings: Settings,
    sides: Mapping[str, Entries],
    wrong: Mapping[str, Sequence[int]],
) -> tuple[Material, dict[str, Entries]]:
    """The responses that trials are of, and of each wrong side the entries in its own first wrong ones."""
    own = {name: _first(responses, rows) for name, rows in wrong.items() if rows}
    some = sorted({i for rows in own.values() for i in rows})
    entries = {
        name: Entries(
            [sides[name].values[i] for i in some],
            [sides[name].usable[i] & (i in rows) for i in some],
        )
        for name, rows in own.items()
    }
    fed = {words: [of[i] for i in some] for words, of in ways(responses, subject.special).items()} if some else {}
    return Material([responses[i] for i in some], fed, [reference[i] for i in some], floor, settings), entries


def _first(responses: Sequence[Response], rows: Sequence[int]) -> list[int]:
    """The first of some responses, until they have enough tokens."""
    found: list[int] = []
    tokens = inputs = 0
    for i in rows:
        if tokens >= TRIED_TOKENS or inputs >= TRIED_INPUTS:
            break
        found.append(i)
        tokens += len(responses[i].response_ids)
        inputs += len(responses[i].response_ids) + len(responses[i].prompt_ids)
    return found


def _verdict(
    name: str, distance: Tensor, counted: int, wrong_responses: int, trials: Trials, material: Material, tokens: int
) -> Side:
    """The verdict from the distances [n] of the `counted` tokens that have one, and trials on some `tokens`."""
    empty = counted - distance.numel()
    tried = trials.by_side.get(name, ())
    cause = _cause(tried, trials.halves, material) if tried else UNKNOWN if wrong_responses else ""
    if empty:
        cause = " and ".join(filter(None, [f"{empty:,} of {counted:,} tokens have no log-prob or a 0", cause]))
    return Side(
        name=name,
        tokens=distance.numel(),
        empty=empty,
        rms=rms(distance),
        largest=float(distance.abs().max()) if distance.numel() else math.nan,
        mean=float(distance.mean()) if distance.numel() else math.nan,
        wrong_responses=wrong_responses,
        is_right=not cause,
        cause=cause,
        left=tried[0].left if tried else rms(distance),
        tried_tokens=tokens,
        tried=tuple(tried[:SHOWN]),
        given_up=trials.given_up.get(name, 0),
    )


def _cause(tried: Sequence[Tried], halves: Mapping[str, float], material: Material) -> str:
    given = material.settings.temperature
    best, plain = tried[0], next(t.left for t in tried if not t.conditions.deviations(given))
    found = " and ".join(best.conditions.deviations(given))
    is_half = best.conditions.inputs.weights in HALF
    if found and best.left <= RIGHT * material.floor:
        return found
    if found and best.left <= (LEFT_OF_HALF if is_half else LEFT) * plain:
        rest = "" if is_half else _as_half(best.left, halves)
        return f"{found} and {rest}" if rest else found
    return _as_half(plain, halves) or (
        f"{UNKNOWN}, in part {found}" if found and best.left <= LEFT_IN_PART * plain else UNKNOWN
    )


def _as_half(distance: float, halves: Mapping[str, float]) -> str:
    """Says that a distance is of the size of 16-bit rounding; "" where it is not."""
    near = next(((name, size) for name, size in halves.items() if size / 3 <= distance <= 3 * size), None)
    return f"{ROUNDED} {near[0]} rounding is ({near[1]:.2g} nats rms), in other digits" if near else ""


def _scored(
    responses: Sequence[Response], reference: Sequence[Tensor], sampler: Sequence[Tensor], trainer: Sequence[Tensor]
) -> Scored:
    counts = [torch.tensor(r.counts) for r in responses]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([p[c] for p, c in zip(parts, counts, strict=True)])

    return Scored(
        joined([torch.full((len(r.response_ids),), r.row) for r in responses]),
        joined([torch.tensor(r.turns) for r in responses]),
        joined([torch.arange(len(r.response_ids)) for r in responses]),
        joined([torch.tensor(r.response_ids) for r in responses]),
        joined(reference),
        joined(sampler),
        joined(trainer),
    )
