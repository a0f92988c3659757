"""Search the causes of one wrong side: predict numbers from each cause, and measure whether the error left is rounding.

All causes, then all pairs of causes of different stages, are computed on a few tokens of the wrong side. The causes
that leave small errors are computed on more tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from ppo_repro.testing.audit.causes.variant import Rounding, Variant
from ppo_repro.testing.audit.forward import Progress
from ppo_repro.testing.audit.predict import AS_IT_SHOULD_BE, Steps, Tokens, Window
from ppo_repro.testing.audit.rounding import (
    ALIKE,
    FAR,
    FEW,
    FORMATS_APART,
    HALF,
    MOST,
    correlation,
    explains,
    likeness,
    rms,
    sizes_apart,
)
from ppo_repro.testing.audit.wrong_side import WrongSide
from ppo_repro.testing.causes import CAUSES

NEAR = 3.0  # times the largest rounding may be left by a cause on a few tokens: their rms is not that of all tokens
ON_ALL, WORST = 12, 3  # explanations of each level that are computed on all tokens, and if none is near


@dataclass(frozen=True)
class Tried:
    """One explanation: its causes and a remedy in words, and the rms of the remaining error, nats."""

    words: str
    advice: str
    left: float
    explains: bool  # whether what it leaves is rounding
    deviations: float  # causes; one with a fitted parameter counts half more
    explains_zeros: bool = False  # whether every log-prob of exactly 0 is predicted
    temperature: float | None = None  # one that all logits were divided by, if that is among the causes
    is_option: bool = False  # a single option of the model's architecture


def search(side: WrongSide) -> list[Tried]:
    """Return explanations of all tried tokens, or else of the wrong tokens only; the best come first."""
    whole = _ordered(_levels(side))
    if any(t.explains for t in whole):
        return whole
    of_wrong, part = side.wrong_alone, list[Tried]()
    if FEW <= of_wrong.count < 0.95 * side.count:  # else the wrong tokens are all of them, but for chance
        words = f"at {of_wrong.count} of {side.count} tokens"
        part = [replace(t, words=f"{words} {t.words}", temperature=None) for t in _levels(of_wrong) if t.explains]
    return [*_ordered(part), *whole]


def _levels(side: WrongSide) -> list[Tried]:
    """Try no cause, other orders, single causes, 16-bit rounding, pairs of causes, until something explains."""
    singles, near = _level(side, "causes", [(row,) for row in side.rows])
    tried = [_judged(side, (), side.plain), *_reordered(side), *singles]
    if not any(t.explains for t in tried):
        tried += _as_half(side, (), side.plain)
    if not any(t.explains for t in tried):
        pairs = [pair for pair in combinations(side.rows, 2) if _is_pair(*pair, near)]
        tried += _level(side, "pairs of causes", pairs)[0]
    return tried


def _reordered(side: WrongSide) -> list[Tried]:
    """Explain the numbers as log-probs of other responses, or of other tokens of the same response."""
    recorded = {i: side.numbers[i].recorded[side.numbers[i].usable].cpu() for i in side.wrong}
    expected = [numbers.reference[numbers.usable].cpu() for numbers in side.numbers]

    def fits(i: int, left: Tensor) -> bool:  # and what is right but for few tokens has no other order
        return explains(left, rms(recorded[i] - expected[i]), side.tolerance)

    def elsewhere(i: int) -> Tensor | None:
        a = recorded[i]
        others = (a - b for j, b in enumerate(expected) if j != i and len(a) == len(b) > 1)
        return next((left for left in others if fits(i, left)), None)

    def exchanged(i: int) -> Tensor | None:
        left = recorded[i].sort().values - expected[i].sort().values
        return left if len(left) > 2 and fits(i, left) else None

    def tried(words: str, left_of: Callable[[int], Tensor | None]) -> list[Tried]:
        parts = list[Tensor]()
        for i in side.wrong:
            if (left := left_of(i)) is None:
                return []
            parts.append(left)
        return [Tried(words, CAUSES["shuffled"].mend, rms(torch.cat(parts)), True, 1.5)]

    return [
        *tried("the log-probs of other responses", elsewhere),
        *tried("the right numbers in another order within the response", exchanged),
    ]


def _level(side: WrongSide, what: str, level: Sequence[tuple[Variant, ...]]) -> tuple[list[Tried], set[Variant]]:
    """Fit each combination of causes on a few tokens, and compute the best ones on all tried tokens.

    Returns the explanations, and the single causes that came near on the few tokens.
    """
    screened = _screened(side, what, level)
    rounding = (side.scale * rms(side.rounding(row, side.few)) for row in side.rows if _is_half(row))
    limit = NEAR * max(FAR * side.tolerance, *rounding)
    passing = [steps for left, steps in screened if left <= limit]
    tried = []
    for some in passing[:ON_ALL] or [steps for _, steps in screened[:WORST]]:
        steps = _refined(side, some, side.some)
        left = side.left(steps, side.some)
        if left is not None:
            tried += [_judged(side, steps, left), *_as_half(side, steps, left)]
    return tried, {steps[0][0] for steps in passing if len(steps) == 1}


def _screened(side: WrongSide, what: str, level: Sequence[tuple[Variant, ...]]) -> list[tuple[float, Steps]]:
    """Return the rms that each combination leaves on a few tokens, with its causes and their parameters, in order."""
    screened: list[tuple[float, Steps]] = []
    progress = Progress(f"{side.name}, {what}", len(level))
    # in this order logits and their softmax are computed once
    order = "weights", "input", "distribution"
    for rows in sorted(level, key=lambda rows: [[row.words for row in rows if row.stage == s] for s in order]):
        steps = _with_parameters(side, rows)
        left = None if steps is None else side.left(steps, side.few)
        if steps is not None and left is not None:
            screened.append((rms(left), steps))
        progress.step()
    return sorted(screened, key=lambda item: item[0])


def _with_parameters(side: WrongSide, rows: tuple[Variant, ...]) -> Steps | None:
    """Return the causes with the parameter that fits best on a few tokens; None if no value is proposed."""
    plain = tuple((row, 0.0) for row in rows)
    index = next((k for k, row in enumerate(rows) if row.candidates is not None), None)
    if index is None:
        return plain
    fitted, stage = rows[index], {row.stage: row for row in rows}
    assert fitted.candidates is not None
    windows = side.predictor.pieces(
        stage.get("weights", AS_IT_SHOULD_BE), stage.get("input", AS_IT_SHOULD_BE), side.few
    )
    pairs = zip(windows, side.few.windows, strict=True)
    logits = [replace(piece, numbers=side.numbers[w.response]) for of_window, w in pairs for piece in of_window]
    values = fitted.candidates(logits, side.predictor.sampling)[: fitted.in_pairs if len(rows) > 1 else None]
    options = [(*plain[:index], (fitted, x), *plain[index + 1 :]) for x in values]
    left = [(rms(r), k) for k, steps in enumerate(options) if (r := side.left(steps, side.few)) is not None]
    return _refined(side, options[min(left)[1]], side.few) if left else None


def _refined(side: WrongSide, steps: Steps, tokens: Tokens) -> Steps:
    """Return the steps after a least-squares fit of the parameter that has `refine`, if it predicts numbers."""
    index = next((k for k, (row, _) in enumerate(steps) if row.refine), None)
    first = None if index is None else side.left(steps, tokens)
    if index is None or first is None:
        return steps
    size = len(first)

    def at(x: float) -> Steps:
        return (*steps[:index], (steps[index][0], x), *steps[index + 1 :])

    def residuals(x: Any) -> Any:
        left = side.left(at(float(x[0])), tokens)
        # a value that predicts other tokens than the first value is refused
        return left.numpy() if left is not None and len(left) == size else np.full(size, MOST)

    fit = least_squares(residuals, [steps[index][1]], method="lm", diff_step=1e-4, ftol=1e-2, xtol=1e-10)
    return at(float(fit.x[0]))


def _judged(side: WrongSide, steps: Steps, left: Tensor) -> Tried:
    """Return an explanation of causes that leave the errors `left`, in words."""
    given = f"{side.predictor.sampling.temperature:.4g}"
    words = [row.words.format(x=x, given=given) if row.change else row.words for row, x in steps]
    before = rms(side.plain) if steps else math.inf
    does = explains(left, before, side.tolerance)
    if side.stored.name and (does or not steps):
        words.append(f"rounded to {side.stored.name}")
    rounded = [rms(side.rounding(row, side.some)) for row, _ in steps if row.rounding not in ("", "weights")]
    does = explains(left, before, side.tolerance, max(rounded, default=0.0))
    predicted = zip(side.predictor(steps, side.some), side.some.windows, strict=True)
    return Tried(
        words=" and ".join(words) or "as it is",
        advice="; ".join(dict.fromkeys(row.advice for row, _ in steps)) or CAUSES["coarse_records"].mend,
        left=rms(left),
        explains=does,
        deviations=sum(row.deviations for row, _ in steps),
        explains_zeros=does and all(_explains_zeros(side, values, w) for values, w in predicted),
        temperature=next((x for row, x in steps if row.is_temperature), None),
        is_option=len(steps) == 1 and steps[0][0].option_advice != "",
    )


def _explains_zeros(side: WrongSide, values: Tensor, w: Window) -> bool:
    at, numbers = slice(w.start, w.end), side.numbers[w.response]
    return bool((values[numbers.counts[at] & (numbers.recorded[at] == 0)].abs() <= side.tolerance).all())


def _as_half(side: WrongSide, steps: Steps, left: Tensor) -> list[Tried]:
    """Return an explanation with 16-bit rounding added, if the remaining errors have its size and its pattern.

    With experts there is none: a small error of any cause may choose other experts, which gives the same pattern.
    """
    judged = _judged(side, steps, left)
    is_excluded = side.has_experts or any(_is_half(row) for row, _ in steps)
    if judged.explains or is_excluded or (steps and rms(left) > HALF * rms(side.plain)):
        return []
    for row in [row for row in side.rows if row.rounding == "computed"]:
        rounding, weights = side.rounding(row, side.some), _of_same_format(side.rows, row, "weights")[0]
        like = likeness(left, rounding, side.rounding(weights, side.some))
        if not like:
            continue
        parts = _of_same_format(side.rows, row, "part")
        alike = [r.words for r in parts if correlation(left, side.rounding(r, side.some)) > ALIKE * like]
        kind = row.format if sizes_apart(left, rounding) <= FORMATS_APART ** (1 / 3) else "16-bit"
        size = f"as large as {kind} rounding ({rms(rounding):.2g} nats rms)"
        what = f"{' or '.join([size, *alike])}, with other bits"
        words = f"{judged.words} and {what}" if steps else what
        advice = f"{judged.advice}; " * bool(steps) + CAUSES["reduced_precision"].mend
        found = [Tried(words, advice, rms(left), True, judged.deviations + 1.5)]
        computed: Steps = ((row, 0.0), *steps)
        exact = side.left(computed, side.some) if steps else None
        return found if exact is None else [_judged(side, computed, exact), *found]
    return []


def _is_half(row: Variant) -> bool:
    return row.rounding in ("computed", "weights")


def _of_same_format(rows: Sequence[Variant], row: Variant, rounding: Rounding) -> list[Variant]:
    """Return the causes that round to the format of `row`, of those that round what `rounding` says."""
    return [r for r in rows if r.rounding == rounding and r.format == row.format]


def _is_pair(a: Variant, b: Variant, near: Set[Variant]) -> bool:
    """Return whether to try both causes together; a 16-bit error is small, so its partner must come near alone."""
    fitted = [row for row in (a, b) if row.candidates is not None]
    is_far = _is_half(a) and b not in near
    if a.option_advice and (b.stage != "distribution" or (fitted and b.in_pairs == 0)):
        return False
    return a.stage != b.stage and not is_far and (not fitted or (len(fitted) == 1 and fitted[0].in_pairs > 0))


def _ordered(tried: Sequence[Tried]) -> list[Tried]:
    """Sort explanations, the best first, without duplicates; those with more deviations lose `explains`.

    An option of the model may predict the same numbers as a fitted parameter (a divisor of the logits acts as a
    temperature). Then both explain.
    """
    once: dict[str, Tried] = {}
    for t in sorted(tried, key=lambda t: (t.deviations, not t.explains, t.left)):
        # another cause beside one that leaves the same is not another explanation
        if t.explains or not any(math.isclose(t.left, other.left, rel_tol=1e-3) for other in once.values()):
            once.setdefault(t.words, t)
    most = min((t.deviations for t in tried if t.explains), default=0.0)
    most += 0.5 * any(t.explains and t.is_option for t in tried)
    found = [replace(t, explains=t.explains and t.deviations <= most) for t in once.values()]
    return sorted(found, key=lambda t: (not t.explains, t.left))
