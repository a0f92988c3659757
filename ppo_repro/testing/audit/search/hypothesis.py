"""Hypotheses about a wrong side: causes that were tried, and whether what they leave of its errors is rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ppo_repro.testing.advice import ADVICE, CauseName
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause
from ppo_repro.testing.audit.measure import is_rounding, rms
from ppo_repro.testing.audit.search.combination import Combination
from ppo_repro.testing.audit.search.trial import Candidate, Trial

# beside its causes, what a hypothesis says about the numbers of a side
Pattern = Literal["none", "like 16-bit rounding", "of other responses", "of other tokens"]
# under which ADVICE has a pattern; without pattern and cause only coarse records can explain errors
_NAMES: dict[Pattern, CauseName] = {
    "none": "coarse_records",
    "like 16-bit rounding": "reduced_precision",
    "of other responses": "shuffled",
    "of other tokens": "shuffled",
}
Identity = tuple[Pattern, Combination]


@dataclass(frozen=True, eq=False)
class Hypothesis(Candidate):
    """Candidate on many tokens of a wrong side, and whether it explains them."""

    explains: bool  # whether the errors that are left are rounding
    words: str
    pattern: Pattern = "none"
    explains_zeros: bool = False  # whether every log-prob of exactly 0 is predicted
    is_of_wrong_alone: bool = False  # of the wrong tokens: the causes do not explain the other tokens

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Return the causes, which a pattern may have too."""
        return self.combination.causes

    @property
    def advice(self) -> str:
        """Return what to do about the causes and the pattern."""
        mends = [cause.advice for cause in self.causes]
        if self.pattern != "none" or (self.explains and not mends):
            mends.append(ADVICE[_NAMES[self.pattern]].mend)
        return "; ".join(dict.fromkeys(mends))

    @property
    def deviations(self) -> float:
        """Return the number of causes, with limits.PER_PARAMETER and limits.PATTERN; 0 without a cause."""
        of_causes = sum(cause.deviations for cause in self.causes)
        return of_causes if self.pattern == "none" else of_causes + limits.PATTERN

    @property
    def temperature(self) -> float | None:
        """Return the temperature that explains all numbers, if the causes alone do and one is among them."""
        is_whole = self.pattern == "none" and not self.is_of_wrong_alone
        return self.combination.temperature if is_whole else None

    @property
    def is_option(self) -> bool:
        """Return whether a single option of the model's architecture explains the numbers."""
        return self.pattern == "none" and len(self.causes) == 1 and self.causes[0].is_option

    @property
    def identity(self) -> Identity:
        """Return the pattern and the causes; hypotheses that differ only in the value of a parameter are one."""
        return self.pattern, self.combination.without_value


def hypothesis_of(trial: Trial, candidate: Candidate) -> Hypothesis:
    """Return the hypothesis that these causes alone leave these errors on many tokens."""
    combination = candidate.combination
    errors = candidate.errors
    causes = combination.causes
    before = trial.plain.left if causes else math.inf
    tolerance = trial.side.tolerance
    narrow = [
        rms(trial.narrow_errors(cause, trial.many)) for cause in causes if cause.rounds("computed", "part", "logits")
    ]
    explains = any(is_rounding(errors, before, tolerance, size) for size in (0.0, *narrow))
    words = combination.words(trial.side.recorded.sampling)
    if trial.side.stored.name and (is_rounding(errors, before, tolerance) or not causes):
        words.append(f"rounded to {trial.side.stored.name}")
    return Hypothesis(
        combination=combination,
        errors=errors,
        explains=explains,
        words=" and ".join(words) or "as it is",
        explains_zeros=explains and _explains_zeros(trial, combination),
    )


def _explains_zeros(trial: Trial, combination: Combination) -> bool:
    """Return whether the causes predict the zeros of the tried tokens; False if the side has zeros only elsewhere."""
    predicted = list[torch.Tensor]()
    is_one_tried = False
    for values, w in zip(trial.predictor(combination, trial.many), trial.many.windows, strict=True):
        numbers = trial.tried_numbers[w.response]
        predicted.append(values[numbers.counts[w.here] & (numbers.recorded[w.here] == 0)])
        is_one_tried |= bool(numbers.unlikely_zeros[w.here].any())
    if not is_one_tried and any(bool(numbers.unlikely_zeros.any()) for numbers in trial.tried_numbers):
        return False
    return bool((torch.cat(predicted).abs() <= trial.side.tolerance).all())


# all hypotheses about a side


@dataclass(frozen=True)
class Hypotheses:
    """Hypotheses about a wrong side, each once: the best ones explain it with the fewest deviations, if any does."""

    best: Sequence[Hypothesis] = ()
    others: Sequence[Hypothesis] = ()  # those that leave the smallest errors first

    @property
    def named(self) -> Sequence[Hypothesis]:
        """Return the hypotheses that the audit names: the best ones, unless these are too many."""
        return self.best if len(self.best) <= limits.NAMED else ()

    def shown(self) -> list[Hypothesis]:
        """Return the best ones, those that leave at most half of the errors, and the one without a cause."""
        without_a_cause = (t.left for t in (*self.best, *self.others) if not t.deviations)
        limit = limits.OF_ERRORS * next(without_a_cause, 0.0)
        plain = [t for t in self.others if not t.deviations]
        near = (t for t in self.others if t.deviations and t.left <= limit)
        return [*[*self.best, *near][: limits.SHOWN - len(plain)], *plain]

    def temperature(self, tolerance: float) -> float | None:
        """Return a temperature that is among the causes of a hypothesis which leaves at most the tolerance."""
        fits = (*self.best, *(t for t in self.others if t.left <= tolerance))
        return next((t.temperature for t in fits if t.temperature is not None), None)


def hypotheses_of(tried: Sequence[Hypothesis]) -> Hypotheses:
    """Tell the hypotheses that explain with the fewest deviations from the others, without duplicates.

    An option of the model may predict the same numbers as a fitted parameter (a divisor of the logits acts as a
    temperature). Then both are among the best.
    """
    fewest = min((t.deviations for t in tried if t.explains), default=0.0)
    is_option_among = any(t.explains and t.is_option for t in tried)
    most = fewest + limits.PER_PARAMETER if is_option_among else fewest
    by_left = sorted(_each_once(tried), key=lambda t: t.left)
    best = [t for t in by_left if t.explains and t.deviations <= most]
    return Hypotheses(best, [t for t in by_left if t not in best])


def _each_once(tried: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Leave out hypotheses that others make superfluous.

    Of hypotheses with the same identity one stays: one that explains the side, or else the one with the smallest
    errors. A hypothesis that does not explain the side is left out if a simpler hypothesis has errors of the same rms.
    """
    once: dict[Identity, Hypothesis] = {}
    for t in sorted(tried, key=lambda t: (t.deviations, not t.explains, t.left)):
        if t.explains and not once.get(t.identity, t).explains:
            once[t.identity] = t
        elif t.explains or not any(math.isclose(t.left, o.left, rel_tol=limits.SAME_LEFT) for o in once.values()):
            once.setdefault(t.identity, t)
    return list(once.values())
