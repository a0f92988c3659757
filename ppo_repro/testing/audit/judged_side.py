"""What the audit says about sampler or trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ppo_repro.testing.audit.distributions import Definition
from ppo_repro.testing.audit.search.hypothesis import Hypotheses

State = Literal["right", "of its own order", "explained", "unknown"]
FILL = "record a log-prob for every token that counts, and leave padding out by the mask"


@dataclass(frozen=True)
class Distance:
    """How far the usable log-probs of a side are from the model in float64, nats."""

    tokens: int  # usable log-probs
    rms: float
    largest: float
    wrong_responses: tuple[int, ...]  # () if the side is right


@dataclass(frozen=True)
class Gaps:
    """Tokens that count and have no log-prob: it is not finite, or exactly 0 though the token is not sure."""

    count: int
    words: str  # "" if there are none


@dataclass(frozen=True)
class JudgedSide:
    """Sampler or trainer, and the verdict about it, which has a state:

    | state | the log-probs of the side |
    |---|---|
    | right | are right |
    | of its own order | are right for one order of cuts, but the other side's for another; the cause names the order |
    | explained | are wrong, or some are missing, and the audit knows why |
    | unknown | are wrong, and the audit does not know why |
    """

    name: str
    definition: Definition  # by which it was judged
    distance: Distance
    gaps: Gaps
    hypotheses: Hypotheses = field(default_factory=Hypotheses)  # that were tried on a wrong side
    known: tuple[str, ...] = ()  # sentences about the numbers and their errors
    temperature: float | None = None  # one that explains the side
    has_own_order: bool = False  # of cuts, and both sides are right, each for its own

    @property
    def state(self) -> State:
        """Return which of the four states the side has."""
        if self.distance.wrong_responses and not self.hypotheses.named:
            return "unknown"
        if self.distance.wrong_responses or self.gaps.count:
            return "explained"
        return "of its own order" if self.has_own_order else "right"

    @property
    def is_right(self) -> bool:
        """Return whether the log-probs are right for the same distribution as the other side's."""
        return self.state == "right"

    @property
    def cause(self) -> str:
        """Return the words of the cause: "unknown" if the audit names none, "" for a right side."""
        if self.state == "unknown":
            return "unknown"
        if self.state == "of its own order":
            return self.definition.words_beside_others
        return " and ".join(filter(None, (self.gaps.words, " or ".join(t.words for t in self.hypotheses.named))))

    @property
    def advice(self) -> str:
        """Return what to do about missing log-probs and the cause; "" for a right side."""
        of_gaps = FILL if self.gaps.count else ""
        return "; ".join(filter(None, (of_gaps, *(t.advice for t in self.hypotheses.named[:1]))))

    @property
    def left(self) -> float | None:
        """Return the rms of what the cause leaves on the tried tokens, nats; None without a cause."""
        return next((t.left for t in self.hypotheses.named), None)

    @property
    def reasons(self) -> list[str]:
        """Return what is printed after the distance: the cause and what it leaves, or what is known without a cause."""
        if self.state == "unknown":
            return [f"the cause is unknown{': ' * bool(self.known)}{'; '.join(self.known)}"]
        if self.state != "explained":
            return []
        return [self.cause] if self.left is None else [self.cause, f"that leaves {self.left:.2g} nats"]
