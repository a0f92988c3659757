"""What the audit says about sampler or trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_repro.testing.audit.distributions import Definition
from ppo_repro.testing.audit.search.hypothesis import Hypothesis

State = Literal["right", "of its own order", "explained", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """What is said about a side: in JSON as `state`, `cause`, `advice`, `left` and `known`.

    | state | the log-probs of the side |
    |---|---|
    | right | are right |
    | of its own order | are right for one order of cuts, the cause; the other side's are right for another order |
    | explained | are wrong, or some are missing, and the audit knows why |
    | unknown | are wrong, and the audit does not know why; the advice is about missing log-probs |
    """

    state: State
    cause: str = ""
    advice: str = ""
    left: float | None = None  # rms of what the cause leaves on the tried tokens, nats; None: the whole distance
    known: tuple[str, ...] = ()  # sentences about the numbers and their errors

    @property
    def is_right(self) -> bool:
        """Return whether the log-probs are right for the same distribution as the other side's."""
        return self.state == "right"

    @property
    def is_of_own_order(self) -> bool:
        """Return whether the log-probs are right for an order of cuts that the other side does not have."""
        return self.state == "of its own order"

    @property
    def is_unknown(self) -> bool:
        """Return whether the log-probs are wrong for an unknown cause."""
        return self.state == "unknown"

    @property
    def reasons(self) -> list[str]:
        """Return what is printed after the distance: the cause and what it leaves, or what is known without a cause."""
        if self.is_unknown:
            return [f"the cause is unknown{': ' * bool(self.known)}{'; '.join(self.known)}"]
        if self.state != "explained":
            return []
        return [self.cause] if self.left is None else [self.cause, f"that leaves {self.left:.2g} nats"]


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
        return self.verdict.is_right
