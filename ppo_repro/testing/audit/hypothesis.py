"""Hypotheses about a wrong side: causes that were tried, and whether what they leave of its errors is rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ppo_repro.testing.advice import ADVICE
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause
from ppo_repro.testing.audit.combination import Combination
from ppo_repro.testing.audit.measure import explains, rms
from ppo_repro.testing.audit.tried_tokens import Trial

# of errors that causes leave, or of the numbers of a side
Pattern = Literal["none", "like 16-bit rounding", "of other responses", "of other tokens"]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """Causes that were tried on a wrong side, and what they leave of its errors."""

    combination: Combination  # whose numbers were compared
    errors: Tensor  # [n] that are left, nats
    explains: bool  # whether these are rounding
    words: str
    advice: str
    deviations: float  # causes, with limits.PER_PARAMETER and limits.PATTERN
    pattern: Pattern = "none"
    explains_zeros: bool = False  # whether every log-prob of exactly 0 is predicted
    temperature: float | None = None  # one that all logits were divided by, if that is among the causes
    is_option: bool = False  # a single option of the model's architecture

    @property
    def identity(self) -> tuple[Pattern, tuple[Cause, ...]]:
        """Return the pattern and the causes; hypotheses that differ only in the value of a parameter are one."""
        return self.pattern, tuple(of.row for of in self.combination.causes)

    @property
    def left(self) -> float:
        """Return the rms of the errors that are left, nats."""
        return rms(self.errors)


@dataclass(frozen=True)
class Hypotheses:
    """Hypotheses about a wrong side, each once: the best ones explain it with the fewest deviations, if any does."""

    best: list[Hypothesis]
    others: list[Hypothesis]  # those that leave the smallest errors first


def hypothesis_of(trial: Trial, combination: Combination, left: Tensor) -> Hypothesis:
    """Return the hypothesis that these causes alone leave the errors `left` on all tried tokens."""
    causes, side = [of.cause for of in combination.causes], trial.side
    before = rms(trial.plain) if causes else math.inf
    rounded = (rms(trial.rounding(cause, trial.many)) for cause in causes if cause.rounds("computed", "part", "logits"))
    does = explains(left, before, side.tolerance, max(rounded, default=0.0))
    words = [of.words(trial.predictor.sampling) for of in combination.causes]
    if side.stored.name and (explains(left, before, side.tolerance) or not causes):
        words.append(f"rounded to {side.stored.name}")
    return Hypothesis(
        combination=combination,
        errors=left,
        explains=does,
        words=" and ".join(words) or "as it is",
        advice="; ".join(dict.fromkeys(cause.advice for cause in causes)) or ADVICE["coarse_records"].mend,
        deviations=sum(cause.deviations for cause in causes),
        explains_zeros=does and _explains_zeros(trial, combination),
        temperature=combination.temperature,
        is_option=len(causes) == 1 and causes[0].is_option,
    )


def _explains_zeros(trial: Trial, combination: Combination) -> bool:
    """Return whether the causes predict the zeros of the tried tokens; False if the side has zeros only elsewhere."""
    predicted, is_one_tried, side = list[Tensor](), False, trial.side
    for values, w in zip(trial.predictor(combination, trial.many), trial.many.windows, strict=True):
        at, numbers = slice(w.start, w.end), side.numbers[w.response]
        predicted.append(values[numbers.counts[at] & (numbers.recorded[at] == 0)])
        is_one_tried |= bool(numbers.unlikely_zeros[at].any())
    if not is_one_tried and any(bool(of.unlikely_zeros.any()) for of in side.numbers):
        return False
    return bool((torch.cat(predicted).abs() <= side.tolerance).all())


def best_of(tried: Sequence[Hypothesis]) -> Hypotheses:
    """Leave out duplicates, and tell the hypotheses that explain with the fewest deviations from the others.

    An option of the model may predict the same numbers as a fitted parameter (a divisor of the logits acts as a
    temperature). Then both are among the best.
    """
    once: dict[tuple[Pattern, tuple[Cause, ...]], Hypothesis] = {}
    for t in sorted(tried, key=lambda t: (t.deviations, not t.explains, t.left)):
        if t.explains and not once.get(t.identity, t).explains:
            once[t.identity] = t
        elif t.explains or not any(_leaves_the_same(t, other) for other in once.values()):
            once.setdefault(t.identity, t)
    fewest = min((t.deviations for t in tried if t.explains), default=0.0)
    fewest += limits.PER_PARAMETER * any(t.explains and t.is_option for t in tried)
    by_left = sorted(once.values(), key=lambda t: t.left)
    best = [t for t in by_left if t.explains and t.deviations <= fewest]
    return Hypotheses(best, [t for t in by_left if t not in best])


def _leaves_the_same(a: Hypothesis, b: Hypothesis) -> bool:
    return math.isclose(a.left, b.left, rel_tol=limits.SAME_LEFT)
