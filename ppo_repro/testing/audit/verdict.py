"""What the audit says about sampler or trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ppo_repro.testing.audit.distributions import Definition
from ppo_repro.testing.audit.search.hypothesis import Hypothesis


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said about a side: in JSON as `state`, `cause`, `advice`, `left` and `known`."""

    state: ClassVar[str]
    cause: str = ""
    advice: str = ""
    left: float | None = None  # rms of what the cause leaves on the tried tokens, nats; None: the whole distance
    known: tuple[str, ...] = ()  # sentences about the numbers and their errors

    @property
    def reasons(self) -> list[str]:
        """Return what is printed after the distance."""
        return []


@dataclass(frozen=True, kw_only=True)
class Right(Verdict):
    """The log-probs are right."""

    state = "right"


@dataclass(frozen=True, kw_only=True)
class OfItsOrder(Verdict):
    """The log-probs are right for one order of cuts, and the other side's log-probs are right for another order."""

    state = "of its own order"
    cause: str  # the order


@dataclass(frozen=True, kw_only=True)
class Explained(Verdict):
    """The log-probs are wrong, or some are missing, and the audit knows why."""

    state = "explained"
    cause: str
    advice: str

    @property
    def reasons(self) -> list[str]:
        """Return the cause, and what it leaves of the errors."""
        return [self.cause] if self.left is None else [self.cause, f"that leaves {self.left:.2g} nats"]


@dataclass(frozen=True, kw_only=True)
class Unknown(Verdict):
    """The log-probs are wrong, and the audit does not know why. The advice is about missing log-probs."""

    state = "unknown"
    cause: str = "unknown"

    @property
    def reasons(self) -> list[str]:
        """Return that the cause is unknown, and what is known."""
        return [f"the cause is unknown{': ' * bool(self.known)}{'; '.join(self.known)}"]


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
    tried: tuple[Hypothesis, ...] = ()  # `Hypotheses.shown`
    temperature: float | None = None  # one that explains the side

    @property
    def is_right(self) -> bool:
        """Return whether the side is right for the same distribution as the other side."""
        return isinstance(self.verdict, Right)
