"""Judge each side against the unmodified model in float64, and search the cause of wrong log-probs.

A side is right if its rms distance is at most 10 times the distance of stock float32 on the same tokens, and no token
is far off. Otherwise every cause (`variants`) predicts numbers. A cause is named only if the remaining error is
rounding: of float32, or of the 16-bit format of the computation or of the file. Else the verdict is `unknown`, with
facts about the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import say
from ppo_repro.models.stock import float64
from ppo_repro.testing.audit.facts import facts, of_format
from ppo_repro.testing.audit.forward import Progress, pieces, states
from ppo_repro.testing.audit.measure import FAR, HALF, RIGHT, rms
from ppo_repro.testing.audit.search import Tried, case_of, search
from ppo_repro.testing.audit.variants import DEFINITIONS, PROCESSED, Numbers, Row, Sampling, distinct, own
from ppo_repro.testing.audit.ways import Subject, fed, positions, vocabulary
from ppo_repro.testing.dumps import Response, impossible

SURE = 0.99  # a token of this probability may have a log-prob that rounds to 0
SHOWN = 8  # explanations that are listed
NAMED = 3  # so many explanations that are equally good are named; with more the cause is unknown
AGREE = 0.1  # sides that are nearer to each other than this part of their distance say the same
UNKNOWN = "unknown"
FLOOR_TOKENS = 2048  # response tokens on which stock float32 is measured
AT_ONCE = 128  # response tokens whose logits are in memory


@dataclass(frozen=True)
class Reference:
    """Right log-probs float64 [n] of each response, and the rms and largest error of stock float32, nats."""

    logprobs: list[Tensor]
    floor: float
    largest: float
    measured: int  # the first responses, in which stock float32 was computed


@dataclass(frozen=True)
class Side:
    """Verdict about sampler or trainer.

    A distance is |log-prob of the side - log-prob of the model in float64| in nats.
    """

    name: str
    definition: str  # of DEFINITIONS, by which it was judged
    tokens: int  # with a finite log-prob
    empty: int  # not finite, or exactly 0 where the model's probability is below 0.99
    rms: float
    largest: float
    wrong_responses: int
    is_right: bool
    cause: str = ""  # "" where it is right; UNKNOWN where nothing fits
    advice: str = ""
    left: float = 0.0  # rms of what the cause leaves, on the tokens that were tried
    known: tuple[str, ...] = ()  # of a cause that is unknown, and of the numbers themselves
    tried: tuple[Tried, ...] = ()  # the best first, each once
    temperature: float | None = None  # one that explains it


@dataclass(frozen=True)
class Audit:
    """Verdicts about sampler and trainer, and the tokens that count.

    `tokens` has one row per token: row, turn, position, token_id, and the log-probs reference, sampler, trainer (nats).
    """

    responses: int
    floor: float  # rms distance of stock float32, nats
    sampler: Side
    trainer: Side
    tokens: pd.DataFrame
    are_comparable: bool = True  # False: each side is right for an order of cuts of its own


@torch.no_grad()
def audit(subject: Subject, responses: Sequence[Response], sampling: Sampling) -> Audit:
    """Judge both sides of a dump. Raises UserError if the dump cannot come from this model."""
    _check(subject, responses)
    references = _references(subject, responses, sampling)
    orders = _different_orders(responses, references, sampling)
    definitions = orders or _definitions(responses, references, sampling)
    numbers = {name: _numbers(name, responses, references[d]) for name, d in definitions.items()}
    sides = {
        name: _side(name, subject, responses, sampling, d, references[d], numbers[name])
        for name, d in definitions.items()
    }
    are_comparable = not orders or not all(side.is_right for side in sides.values())
    if not are_comparable:
        sides = {name: replace(side, is_right=False, cause=_order(side.definition)) for name, side in sides.items()}
    reference = references[definitions["sampler"]]
    if not sampling.is_temperature_given:
        _check_temperature(sides.values())
    _check_unexplained(sides, numbers, reference.floor)
    frames = [
        pd.DataFrame({
            "row": r.row, "turn": r.turns, "position": range(len(r.response_ids)), "token_id": r.response_ids,
            "reference": logprobs.numpy(), "sampler": r.sampler, "trainer": r.trainer,
        })[r.counts]
        for r, logprobs in zip(responses, reference.logprobs, strict=True)
    ]  # fmt: skip
    tokens = pd.concat(frames, ignore_index=True).astype({"sampler": "float64", "trainer": "float64"})
    return Audit(len(responses), reference.floor, sides["sampler"], sides["trainer"], tokens, are_comparable)


def _check(subject: Subject, responses: Sequence[Response]) -> None:
    for r in responses:
        if not r.prompt_ids or not r.response_ids:
            what = "response tokens" if not r.response_ids else "prompt token, so nothing predicts its first token"
            raise UserError(f"row {r.row}: has no {what}; an audit needs the ids of prompt and response")
        worst, length = max(*r.prompt_ids, *r.response_ids), len(r.prompt_ids) + len(r.response_ids)
        advice = "give the folder of the model that the dump was made with"
        for name, model in subject.models.items():
            if worst >= (size := vocabulary(model)):
                raise UserError(
                    f"row {r.row}: token {worst} is not in the vocabulary of {size} of the {name}; {advice}"
                )
            if length > (most := positions(model)):
                raise UserError(f"row {r.row}: {length} tokens; the {name} has {most} positions; {advice}")


def _check_temperature(sides: Iterable[Side]) -> None:
    """Raise UserError if a temperature explains a side and the user gave none: the side may be right or wrong."""
    found = {side.name: f"{side.temperature:.4g}" for side in sides if side.temperature is not None}
    if found:
        said = " and ".join(f"temperature {x} explains the {name}" for name, x in found.items())
        x = next(iter(found.values()))
        raise UserError(
            f"--temperature: missing, and {said}; did you forget --temperature {x}? Give the temperature of the "
            "sampler, --temperature 1 if it was 1"
        )


def _check_unexplained(sides: Mapping[str, Side], numbers: Mapping[str, Sequence[Numbers]], floor: float) -> None:
    """Raise UserError if both sides agree with each other but not with the model, for no known cause."""
    if any(side.cause != UNKNOWN for side in sides.values()):
        return
    pairs = zip(*numbers.values(), strict=True)
    apart = rms(torch.cat([(a.recorded - b.recorded)[a.usable & b.usable] for a, b in pairs]))
    nearer = min(side.rms for side in sides.values())
    if apart <= max(RIGHT * floor, AGREE * nearer):
        known = sides["sampler"].known
        raise UserError(
            f"--model: sampler and trainer are {apart:.2g} nats (rms) from each other and {nearer:.2g} from this "
            f"model, and no fault explains it{f' ({known[0]})' if known else ''}; give the folder of the weights that "
            "the dump was made with, and its --temperature and cuts"
        )


def _references(subject: Subject, responses: Sequence[Response], sampling: Sampling) -> dict[str, Reference]:
    """Return the reference of each definition that the settings distinguish, or that the user asked for.

    Stock float32 computes only the first tokens, because these suffice to estimate its rounding error.
    """
    asked = {sampling.sampler_logprobs, sampling.trainer_logprobs} - {"auto"}
    names = list(dict.fromkeys([*distinct(sampling), *sorted(asked)]))
    sizes = [len(r.response_ids) for r in responses]
    first = [i for i, size in enumerate(accumulate(sizes)) if i == 0 or size <= FLOOR_TOKENS]
    with float64(subject.model):
        wide = _logprobs(subject.model, responses, sampling, names, True)
    stock = _logprobs(subject.model, [responses[i] for i in first], sampling, names, False)
    references = {}
    for name in names:
        pairs = zip(wide[name], stock[name], (responses[i].counts for i in first), strict=False)
        apart = torch.cat([(b - a)[torch.tensor(counts)] for a, b, counts in pairs])
        apart = apart[apart.isfinite()]
        largest = float(apart.abs().max()) if len(apart) else 0.0
        references[name] = Reference(wide[name], max(rms(apart), 2.0**-24), largest, len(first))
    return references


def _largest(
    model: PreTrainedModel,
    responses: Sequence[Response],
    sampling: Sampling,
    definition: str,
    reference: Reference,
    distances: Sequence[Tensor],
) -> float:
    """Return the largest distance (nats) of stock float32 over the first responses and those with a far token."""
    limit = FAR * RIGHT * reference.floor
    far = [i for i, d in enumerate(distances) if i >= reference.measured and bool((d.abs() > limit).any())]
    stock = _logprobs(model, [responses[i] for i in far], sampling, [definition], False)[definition] if far else []
    apart = [(x - reference.logprobs[i])[torch.tensor(responses[i].counts)] for i, x in zip(far, stock, strict=True)]
    return max([reference.largest, *(float(x[x.isfinite()].abs().amax(0)) for x in apart if len(x[x.isfinite()]))])


def _logprobs(
    model: PreTrainedModel, responses: Sequence[Response], sampling: Sampling, names: Sequence[str], is_wide: bool
) -> dict[str, list[Tensor]]:
    """Return the log-probs [n] float64 of each response by each definition."""
    found = {name: [torch.empty(0)] * len(responses) for name in names}
    progress = Progress(f"responses in float{64 if is_wide else 32}", len(responses))
    passes = [fed(r.prompt_ids, r.response_ids) for r in responses]
    for i, of_tokens in states(model, passes, is_wide):
        r, length = responses[i], len(responses[i].response_ids)
        ids = torch.tensor(r.response_ids, device=model.device)
        none = torch.empty(0)
        numbers, parts = Numbers(none, none, none, none), dict[str, list[Tensor]]((name, []) for name in names)
        for start in range(0, length, AT_ONCE):
            logits = of_tokens.logits(model, start, start + AT_ONCE)
            for at in pieces(*logits.shape):
                before = slice(start + at.start, start + at.stop)
                row = Row(logits[at].double(), ids[before], r.prompt_ids, r.response_ids[: before.start], numbers)
                for name in names:
                    parts[name].append(own(row, DEFINITIONS[name].change(row, sampling, row.logits, 0.0)).cpu())
        for name in names:
            found[name][i] = torch.cat(parts[name])
        progress.step()
    return found


def _numbers(name: str, responses: Sequence[Response], reference: Reference) -> list[Numbers]:
    found = []
    for r, right in zip(responses, reference.logprobs, strict=True):
        recorded, counts = torch.tensor(getattr(r, name)).double(), torch.tensor(r.counts)
        is_empty = ~recorded.isfinite() | ((recorded == 0) & (right < math.log(SURE)))
        found.append(Numbers(recorded, counts & ~is_empty, counts, right))
    return found


def _distances(numbers: Sequence[Numbers]) -> list[Tensor]:
    """Return recorded minus right log-probs of the usable tokens of each response, at most 1000 nats."""
    return [(of.recorded - of.reference)[of.usable].clamp(-1e3, 1e3) for of in numbers]


def _rms(name: str, responses: Sequence[Response], reference: Reference) -> float:
    return rms(torch.cat(_distances(_numbers(name, responses, reference))))


def _definitions(
    responses: Sequence[Response], references: Mapping[str, Reference], sampling: Sampling
) -> dict[str, str]:
    """Choose the definition of each side's log-probs: the user's, or else the nearest one to both sides.

    Both sides must have the same definition. Tokens were sampled at the temperature, so log-probs at temperature 1 are
    right only if the user declared them.
    """
    asked = {"sampler": sampling.sampler_logprobs, "trainer": sampling.trainer_logprobs}
    rounding = RIGHT * max(reference.floor for reference in references.values())  # the same for all: it is no reason

    def distance(definition: str, sides: Sequence[str]) -> float:
        reference, total = references[definition], 1.0 * (definition != "tempered")
        for name in sides:
            total += math.log(_rms(name, responses, reference) + rounding)
        return total

    def nearest(names: Sequence[str], sides: Sequence[str]) -> str:
        return min(names, key=lambda definition: distance(definition, sides))

    free = [name for name, said in asked.items() if said == "auto"]
    best = nearest([name for name in references if name != "raw"], free)
    of_engines = [name for name in references if DEFINITIONS[name].order is not None]  # in different orders of cuts
    of_said = {"auto": lambda name: best, PROCESSED: lambda name: nearest(of_engines, [name])}
    return {name: of_said.get(said, lambda name, said=said: said)(name) for name, said in asked.items()}


def _different_orders(
    responses: Sequence[Response], references: Mapping[str, Reference], sampling: Sampling
) -> dict[str, str]:
    """Return the order of cuts that each side is right for if no order serves both sides, else nothing."""
    if {sampling.sampler_logprobs, sampling.trainer_logprobs} - {"auto", PROCESSED}:
        return {}
    right: dict[str, list[str]] = {}
    for name in ("sampler", "trainer"):
        far = {
            definition: _rms(name, responses, reference) / reference.floor
            for definition, reference in references.items()
            if DEFINITIONS[definition].order is not None
        }
        right[name] = sorted((d for d, distance in far.items() if distance <= RIGHT), key=lambda d: far[d])
    if not all(right.values()) or set(right["sampler"]) & set(right["trainer"]):
        return {}
    return {name: found[0] for name, found in right.items()}


def _order(definition: str) -> str:
    return f"{PROCESSED}, each cut of all tokens" if definition == PROCESSED else definition


def _side(
    name: str,
    subject: Subject,
    responses: Sequence[Response],
    sampling: Sampling,
    definition: str,
    reference: Reference,
    numbers: Sequence[Numbers],
) -> Side:
    distances = _distances(numbers)
    every, recorded = torch.cat(distances), torch.cat([of.recorded[of.counts] for of in numbers])
    counted = len(recorded)
    largest = float(every.abs().max()) if len(every) else math.nan
    limit = RIGHT * reference.floor
    is_right = rms(every) <= limit
    if is_right and largest > FAR * limit:
        is_right = largest <= 3 * _largest(subject.model, responses, sampling, definition, reference, distances)
    wrong = [i for i, d in enumerate(distances) if len(d) and (rms(d) > limit or float(d.abs().max()) > FAR * limit)]
    why, missing = impossible(recorded.float().numpy()), counted - len(every)
    finite = recorded[recorded.isfinite()]
    are_zeros = len(finite) > 0 and not bool(finite.any())
    empty = f"{missing:,} of {counted:,} tokens have no log-prob or a 0" if missing else ""
    side = Side(
        name=name,
        definition=definition,
        tokens=len(every),
        empty=missing,
        rms=rms(every),
        largest=largest,
        wrong_responses=0 if is_right else len(wrong),
        is_right=is_right and not missing,
        cause=why if missing and are_zeros else empty,
        advice="record a log-prob for every token that counts, and leave padding out by the mask" if empty else "",
        left=rms(every),
    )
    if is_right or not wrong:
        return side
    say(f"audit: {name} is wrong; looks for the cause")
    case = case_of(name, subject, responses, sampling, DEFINITIONS[definition].change, reference.floor, numbers, wrong)
    tried = search(case)
    best = [t for t in tried if t.explains]
    plain = next(t.left for t in tried if not t.deviations)
    shown = [t for t in tried if t.explains or not t.deviations or t.left <= HALF * plain]
    fits = [*best, *(t for t in tried if t.left <= case.tolerance)]
    known = of_format(case.stored)
    if best and best[0].explains_zeros:
        missing = int((~recorded.isfinite()).sum())
        empty = f"{missing:,} of {counted:,} tokens have no log-prob" if missing else ""
        side = replace(side, empty=missing, cause=empty, advice=side.advice if empty else "")
    if 0 < len(best) <= NAMED:
        cause, advice, left = " or ".join(t.words for t in best), best[0].advice, best[0].left
        known = known if case.stored.mantissa else []  # decimals are no format of a computation
    else:
        cause, advice, left = UNKNOWN, "", side.rms
        known = [*filter(None, [side.cause or why]), *known, *facts(responses, numbers, case.tolerance)]
    return replace(
        side,
        cause=" and ".join(filter(None, [side.cause, cause])) if cause != UNKNOWN else UNKNOWN,
        advice="; ".join(filter(None, [side.advice, advice])),
        left=left,
        known=tuple(known),
        tried=tuple(shown[:SHOWN]),
        temperature=next((t.temperature for t in fits if t.temperature is not None), None),
    )


def verdict(found: Audit) -> str:
    """Return the words that say which side is wrong, or that both are, or that none is."""
    if not found.are_comparable:
        return "the sides are processed in different orders of the cuts; take one order on both"
    wrong = [side.name for side in (found.sampler, found.trainer) if not side.is_right]
    return {0: "both sides are right", 1: f"the {''.join(wrong)} is wrong", 2: "both sides are wrong"}[len(wrong)]


def lines(found: Audit, skipped: int = 0, unread: int = 0) -> list[str]:
    """Return the printed lines of the audit, the verdict last.

    `skipped` is the number of responses left out, `unread` of those after the last one that was judged.
    """
    left_out = f" ({skipped:,} without a token that counts left out)" if skipped else ""
    judged = f"{found.responses:,} of {found.responses + unread:,}" if unread else f"{found.responses:,}"
    sides = (found.sampler, found.trainer)
    return [
        f"{len(found.tokens):,} tokens of {judged} responses{left_out}; stock float32 is "
        f"{found.floor:.2g} nats (rms) from the model in float64",
        *(_sentence(side, found.responses, found.are_comparable) for side in sides),
        *(f"{side.name}: {t.left:.2g} nats (rms) are left by: {t.words}" for side in sides for t in side.tried),
        *(f"{side.name}: {side.advice}" for side in sides if side.advice),
        f"verdict: {verdict(found)}",
    ]


def _sentence(side: Side, responses: int, is_comparable: bool) -> str:
    if not is_comparable:
        return f"{side.name} is {side.cause}; {side.rms:.2g} nats (rms) from the model in float64"
    is_unknown, verb = side.cause == UNKNOWN, "right" if side.is_right else "wrong"
    some = 0 < side.wrong_responses < responses and not is_unknown
    where = f", in {side.wrong_responses} of {responses} responses" if some else ""
    definition = "" if side.definition == "tempered" else f" (log-probs judged as {side.definition})"
    parts = [f"{side.rms:.2g} nats (rms) from the model in float64{where}{definition}"] if side.tokens else []
    if is_unknown:
        parts.append(f"the cause is unknown{': ' * bool(side.known)}{'; '.join(side.known)}")
    elif not side.is_right:
        parts += [side.cause, *([f"that leaves {side.left:.2g} nats"] if side.tried else [])]
    return f"{side.name} is {verb}: {'; '.join(parts)}"
