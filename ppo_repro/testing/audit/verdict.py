"""What the audit says about sampler or trainer."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_repro.testing.audit.distributions import Definition
from ppo_repro.testing.audit.search.hypothesis import Hypothesis


@dataclass(frozen=True)
class Right:
    """The log-probs are right."""


@dataclass(frozen=True)
class OfItsOrder:
    """The log-probs are right for one order of cuts, and the other side's log-probs are right for another order."""

    order: str  # in words


@dataclass(frozen=True)
class Explained:
    """The log-probs are wrong, or some are missing, and the audit knows why."""

    cause: str
    advice: str
    left: float | None = None  # rms of what the cause leaves on the tried tokens, nats; None if some are only missing
    known: tuple[str, ...] = ()  # sentences about the numbers


@dataclass(frozen=True)
class Unknown:
    """The log-probs are wrong, and the audit does not know why."""

    advice: str  # about missing log-probs, "" if none is missing
    known: tuple[str, ...]  # sentences about the numbers and their errors


Verdict = Right | OfItsOrder | Explained | Unknown


@dataclass(frozen=True)
class Distance:
    """How far the usable log-probs of a side are from the model in float64, nats."""

    tokens: int  # usable log-probs
    rms: float
    largest: float
    wrong_responses: tuple[int, ...]  # () if the side is right


@dataclass(frozen=True)
class JudgedSide:
    """Sampler or trainer, and the verdict about it."""

    name: str
    definition: Definition  # by which it was judged
    distance: Distance
    empty: int  # log-probs that are not finite, or exactly 0 where the model's probability is below limits.SURE
    verdict: Verdict
    best: tuple[Hypothesis, ...] = ()  # that explain the side
    tried: tuple[Hypothesis, ...] = ()  # `best`, then those that leave at most half of the errors, and no cause
    temperature: float | None = None  # one that explains the side

    @property
    def is_right(self) -> bool:
        """Return whether the side is right for the same distribution as the other side."""
        return isinstance(self.verdict, Right)
