"""Judge one side of a dump: measure its distance from the model, search the cause, and put the finding together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ppo_repro.base.output import say
from ppo_repro.testing.audit.causes.variant import Numbers
from ppo_repro.testing.audit.reference import RecordedSide, distances, largest_error
from ppo_repro.testing.audit.rounding import FAR, HALF, RIGHT, rms
from ppo_repro.testing.audit.search import Tried, search
from ppo_repro.testing.audit.subject import Subject
from ppo_repro.testing.audit.unknown_cause import facts, of_format
from ppo_repro.testing.audit.wrong_side import WrongSide, wrong_side_of
from ppo_repro.testing.dumps import impossible

SHOWN = 8  # explanations that are listed
NAMED = 3  # so many explanations that are equally good are named; with more the cause is unknown
FILL = "record a log-prob for every token that counts, and leave padding out by the mask"


@dataclass(frozen=True)
class Right:
    """Finding: the side is right."""


@dataclass(frozen=True)
class Explained:
    """Finding: the side is wrong by a known cause."""

    words: str
    advice: str
    left: float  # rms of what the cause leaves, nats, on the tokens that were tried


@dataclass(frozen=True)
class Unknown:
    """Finding: the side is wrong, and no cause fits."""

    advice: str  # about tokens without a log-prob


@dataclass(frozen=True)
class Distance:
    """How far the usable log-probs of a side are from the model in float64, nats."""

    tokens: int  # usable log-probs
    rms: float
    largest: float
    wrong: tuple[int, ...]  # responses with a wrong log-prob; () if the side is right


@dataclass(frozen=True)
class Side:
    """Verdict about sampler or trainer."""

    name: str
    definition: str  # of DEFINITIONS, by which it was judged
    distance: Distance
    empty: int  # log-probs that are not finite, or exactly 0 where the model's probability is below 0.99
    finding: Right | Explained | Unknown
    known: tuple[str, ...] = ()  # of a cause that is unknown, and of the numbers themselves
    tried: tuple[Tried, ...] = ()  # the best first, each once
    temperature: float | None = None  # one that explains it

    @property
    def is_right(self) -> bool:
        """Return whether the side is right."""
        return isinstance(self.finding, Right)

    @property
    def cause(self) -> str:
        """Return the cause in words; "" if the side is right."""
        match self.finding:
            case Right():
                return ""
            case Explained(words):
                return words
            case Unknown():
                return "unknown"


def judged(subject: Subject, recorded: RecordedSide) -> Side:
    """Judge what one side recorded; `subject` is the model, and others that may have been used instead."""
    name, definition, numbers = recorded.name, recorded.definition, recorded.numbers
    distance = _measured(subject, recorded)
    empty, gaps = _gaps(numbers)
    if not distance.wrong:
        return Side(name, definition, distance, empty, Explained(gaps, FILL, distance.rms) if gaps else Right())
    say(f"audit: {name} is wrong; looks for the cause")
    wrong = wrong_side_of(subject, recorded, distance.wrong)
    tried = search(wrong)
    best = [t for t in tried if t.explains]
    if best and best[0].explains_zeros:
        empty, gaps = _gaps(numbers, are_zeros_explained=True)
    finding = _finding(best, gaps)
    plain = next(t.left for t in tried if not t.deviations)
    shown = [t for t in tried if t.explains or not t.deviations or t.left <= HALF * plain]
    fits = [*best, *(t for t in tried if t.left <= wrong.tolerance)]
    return Side(
        name=name,
        definition=definition,
        distance=distance,
        empty=empty,
        finding=finding,
        known=tuple(_known(finding, wrong, recorded, gaps)),
        tried=tuple(shown[:SHOWN]),
        temperature=next((t.temperature for t in fits if t.temperature is not None), None),
    )


def _measured(subject: Subject, recorded: RecordedSide) -> Distance:
    of_responses, limit = distances(recorded.numbers), RIGHT * recorded.reference.floor
    every = torch.cat(of_responses)
    largest = float(every.abs().max()) if len(every) else math.nan
    far = [i for i, d in enumerate(of_responses) if bool((d.abs() > FAR * limit).any())]
    is_right = rms(every) <= limit
    if is_right and far:
        is_right = largest <= 3 * largest_error(subject.model, recorded, far)
    wrong = [] if is_right else [i for i, d in enumerate(of_responses) if rms(d) > limit or i in far]
    return Distance(len(every), rms(every), largest, tuple(wrong))


def _counted(numbers: Sequence[Numbers]) -> torch.Tensor:
    return torch.cat([of.recorded[of.counts] for of in numbers])


def _gaps(numbers: Sequence[Numbers], are_zeros_explained: bool = False) -> tuple[int, str]:
    """Return the number of tokens without a log-prob, and a sentence about them, "" if there are none."""
    values, usable = _counted(numbers), sum(int(of.usable.sum()) for of in numbers)
    missing = int((~values.isfinite()).sum()) if are_zeros_explained else len(values) - usable
    if not missing:
        return 0, ""
    finite = values[values.isfinite()]
    if len(finite) and not bool(finite.any()) and not are_zeros_explained:
        return missing, impossible(values.float().numpy())
    or_zero = "" if are_zeros_explained else " or a 0"
    return missing, f"{missing:,} of {len(values):,} tokens have no log-prob{or_zero}"


def _finding(best: Sequence[Tried], gaps: str) -> Explained | Unknown:
    """Return the best explanations as one, with the tokens without a log-prob."""
    if not 0 < len(best) <= NAMED:
        return Unknown(FILL if gaps else "")
    words, advice = " or ".join(t.words for t in best), best[0].advice
    if gaps:
        words, advice = f"{gaps} and {words}", f"{FILL}; {advice}"
    return Explained(words, advice, best[0].left)


def _known(finding: Explained | Unknown, wrong: WrongSide, recorded: RecordedSide, gaps: str) -> list[str]:
    """Return sentences about the numbers; if a cause is named, only about the format of a computation."""
    if isinstance(finding, Explained):
        return of_format(wrong.stored) if wrong.stored.mantissa else []  # decimals are no format of a computation
    why = gaps or impossible(_counted(recorded.numbers).float().numpy())
    found = facts(recorded.responses, recorded.numbers, wrong.tolerance)
    return [*filter(None, [why]), *of_format(wrong.stored), *found]
