"""Search the causes of one wrong side: predict numbers from each cause, and measure whether the error left is rounding.

All causes, then all pairs of causes of different stages, are computed on a few tokens. The causes that leave small
errors are computed on more tokens. The tokens are windows of neighbouring tokens that begin shortly before the first
wrong token of a response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from ppo_repro.testing.audit.distributions import DEFINITIONS, tempered
from ppo_repro.testing.audit.forward import Progress
from ppo_repro.testing.audit.measure import (
    ALIKE,
    FEW,
    FORMATS_APART,
    HALF,
    MOST,
    RIGHT,
    Stored,
    correlation,
    errors,
    explains,
    likeness,
    rms,
    sizes_apart,
    stored_as,
)
from ppo_repro.testing.audit.predict import AS_IT_SHOULD_BE, Predictor, Steps, Tokens, Window
from ppo_repro.testing.audit.reference import Recorded
from ppo_repro.testing.audit.stages import Numbers, Rounding, Variant
from ppo_repro.testing.audit.table import table
from ppo_repro.testing.audit.ways import Subject
from ppo_repro.testing.causes import CAUSES
from ppo_repro.testing.dumps import Response

TRIED = 256  # response tokens that causes are tried on
WINDOW = FEW  # tokens of a window for screening, and at most so many right ones before its first wrong one
SCREENED = 3 * WINDOW  # response tokens that causes are screened on, unless WINDOW wrong ones come first
NEAR = 3.0  # times the largest rounding may be left by a cause on a few tokens: their rms is not that of all tokens
ON_ALL, WORST = 12, 3  # explanations of each level that are computed on all tokens, and if none is near
EXACT_LOGITS = Variant("logits", "distribution", "none", tempered)  # beside which logits are rounded


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


@dataclass(frozen=True)
class Case:
    """What is known of a wrong side, on the tokens that causes are tried on."""

    name: str
    rows: tuple[Variant, ...]
    predictor: Predictor
    numbers: Sequence[Numbers]
    wrong: Sequence[int]  # responses with a wrong log-prob
    few: Tokens
    some: Tokens
    stored: Stored
    scale: float  # of the numbers: sums of many log-probs round more
    tolerance: float  # rms of rounding, nats
    has_experts: bool

    @cached_property
    def plain(self) -> Tensor:
        """Return the errors of the tokens that causes are tried on, without a cause."""
        left = _left(self, (), self.some)
        assert left is not None
        return left


def case_of(subject: Subject, side: Recorded, wrong: Sequence[int]) -> Case:
    """Return the case of a side; `wrong` are the indices of the responses with a wrong log-prob."""
    responses, numbers, sampling = side.responses, side.numbers, side.sampling
    definition = DEFINITIONS[side.definition].change
    every = torch.cat([numbers[i].recorded[numbers[i].usable] for i in wrong])
    ideal = torch.cat([numbers[i].reference[numbers[i].usable] for i in wrong])
    scale = max(1.0, rms(every) / max(rms(ideal), 1e-9))
    tolerance = RIGHT * side.reference.floor * scale + 2.0**-22 * rms(every)
    device = subject.model.device
    numbers = [Numbers(*(x.to(device) for x in (of.recorded, of.usable, of.counts, of.reference))) for of in numbers]
    bad = [_bad(of, tolerance) for of in numbers]
    few = _windows(responses, numbers, bad, wrong, WINDOW, SCREENED, WINDOW)
    some = _windows(responses, numbers, bad, wrong, max(4 * WINDOW, math.ceil(TRIED / len(wrong))), TRIED, TRIED)
    last, size = some[-1], len(responses[some[-1].response].response_ids)
    if size > last.end:  # a cause has to be right at the end of a response too
        some += (Window(last.response, max(last.end, size - 4 * WINDOW), size),)

    def is_predicted(row: Variant) -> bool:
        return row.stage != "input" or any(f.within(w.start, w.end) for w in few for f in row.passes[w.response])

    return Case(
        name=side.name,
        rows=tuple(filter(is_predicted, table(subject, responses, sampling, definition))),
        predictor=Predictor(subject.model, responses, numbers, sampling, definition),
        numbers=numbers,
        wrong=wrong,
        few=Tokens(few, is_screening=True),
        some=Tokens(some),
        stored=stored_as(every),
        scale=scale,
        tolerance=tolerance,
        has_experts=any(name.endswith("experts") for name, _ in subject.model.named_modules()),
    )


def _bad(numbers: Numbers, tolerance: float) -> Tensor:
    """Return which tokens [n] of a response are wrong."""
    return numbers.usable & ~((numbers.recorded - numbers.reference).abs() <= tolerance)


def _windows(
    responses: Sequence[Response],
    numbers: Sequence[Numbers],
    bad: Sequence[Tensor],
    wrong: Sequence[int],
    length: int,
    tokens: int,
    most: int,
) -> tuple[Window, ...]:
    """Return windows of wrong responses until they have enough usable tokens, or enough wrong ones.

    Args:
        responses: prompts and tokens.
        numbers: of each response, which tokens are usable.
        bad: of each response, which tokens [n] are wrong.
        wrong: the responses to choose from; those with few tokens before the window come first, for short passes.
        length: tokens of a window, or up to twice as many if they are the rest of the response.
        tokens: usable tokens that are enough.
        most: wrong tokens that are enough.
    """
    found, usable, count = list[Window](), 0, 0
    first = {i: (bad[i].nonzero()[:1, 0].tolist() or [0])[0] for i in wrong}
    for i in sorted(wrong, key=lambda i: max(first[i], WINDOW) + len(responses[i].prompt_ids)):
        if usable < tokens and count < most:
            start, whole = max(0, first[i] - min(WINDOW, length // 2)), len(responses[i].response_ids)
            end = whole if whole - start <= 2 * length else start + length
            found.append(Window(i, start, end))
            usable += int(numbers[i].usable[start:end].sum())
            count += int(bad[i][start:end].sum())
    return tuple(found)


def search(case: Case) -> list[Tried]:
    """Return explanations of all tried tokens, or else of the wrong tokens only; the best come first."""
    whole = _ordered(_levels(case))
    if any(t.explains for t in whole):
        return whole
    of_wrong = replace(case, numbers=[replace(of, usable=_bad(of, case.tolerance)) for of in case.numbers])
    every, some, part = _count(case), _count(of_wrong), list[Tried]()
    if FEW <= some < 0.95 * every:  # else the wrong tokens are all of them, but for chance
        words = f"at {some} of {every} tokens"
        part = [replace(t, words=f"{words} {t.words}", temperature=None) for t in _levels(of_wrong) if t.explains]
    return [*_ordered(part), *whole]


def _count(case: Case) -> int:
    return sum(int(case.numbers[w.response].usable[w.start : w.end].sum()) for w in case.some.windows)


def _levels(case: Case) -> list[Tried]:
    singles, near = _level(case, "causes", [(row,) for row in case.rows])
    tried = [_judged(case, (), case.plain), *_reordered(case), *singles]
    if not any(t.explains for t in tried):
        tried += _as_half(case, (), case.plain)
    if not any(t.explains for t in tried):
        pairs = [pair for pair in combinations(case.rows, 2) if _is_pair(*pair, near)]
        tried += _level(case, "pairs of causes", pairs)[0]
    return tried


def _is_pair(a: Variant, b: Variant, near: Set[Variant]) -> bool:
    """Return whether to try both causes together; a 16-bit error is small, so its partner must come near alone."""
    fitted = [row for row in (a, b) if row.candidates is not None]
    is_far = _is_half(a) and b not in near
    if a.option_advice and (b.stage != "distribution" or (fitted and b.in_pairs == 0)):
        return False
    return a.stage != b.stage and not is_far and (not fitted or (len(fitted) == 1 and fitted[0].in_pairs > 0))


def _is_half(row: Variant) -> bool:
    return row.rounding in ("computed", "weights")


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


def _level(case: Case, what: str, level: Sequence[tuple[Variant, ...]]) -> tuple[list[Tried], set[Variant]]:
    """Fit each combination of causes on a few tokens, and compute the best ones on all tried tokens.

    Returns the explanations, and the single causes that came near on the few tokens.
    """
    screened: list[tuple[float, Steps]] = []
    progress = Progress(f"{case.name}, {what}", len(level))
    # in this order logits and their softmax are computed once
    order = "weights", "input", "distribution"
    for rows in sorted(level, key=lambda rows: [[row.words for row in rows if row.stage == s] for s in order]):
        steps = _with_parameters(case, rows)
        left = None if steps is None else _left(case, steps, case.few)
        if steps is not None and left is not None:
            screened.append((rms(left), steps))
        progress.step()
    screened.sort(key=lambda item: item[0])
    rounding = (case.scale * rms(_own(case, row, case.few)) for row in case.rows if _is_half(row))
    limit = NEAR * max(RIGHT * case.tolerance, *rounding)
    passing = [steps for left, steps in screened if left <= limit]
    tried = []
    for some in passing[:ON_ALL] or [steps for _, steps in screened[:WORST]]:
        steps = _refined(case, some, case.some)
        left = _left(case, steps, case.some)
        if left is not None:
            tried += [_judged(case, steps, left), *_as_half(case, steps, left)]
    return tried, {steps[0][0] for steps in passing if len(steps) == 1}


def _with_parameters(case: Case, rows: tuple[Variant, ...]) -> Steps | None:
    """Return the causes with the parameter that fits best on a few tokens; None if no value is proposed."""
    plain = tuple((row, 0.0) for row in rows)
    index = next((k for k, row in enumerate(rows) if row.candidates is not None), None)
    if index is None:
        return plain
    fitted, stage = rows[index], {row.stage: row for row in rows}
    assert fitted.candidates is not None
    windows = case.predictor.pieces(
        stage.get("weights", AS_IT_SHOULD_BE), stage.get("input", AS_IT_SHOULD_BE), case.few
    )
    pairs = zip(windows, case.few.windows, strict=True)
    logits = [replace(piece, numbers=case.numbers[w.response]) for of_window, w in pairs for piece in of_window]
    values = fitted.candidates(logits, case.predictor.sampling)[: fitted.in_pairs if len(rows) > 1 else None]
    options = [(*plain[:index], (fitted, x), *plain[index + 1 :]) for x in values]
    left = [(rms(r), k) for k, steps in enumerate(options) if (r := _left(case, steps, case.few)) is not None]
    return _refined(case, options[min(left)[1]], case.few) if left else None


def _refined(case: Case, steps: Steps, tokens: Tokens) -> Steps:
    """Return the steps after a least-squares fit of the parameter that has `refine`, if it predicts numbers."""
    index = next((k for k, (row, _) in enumerate(steps) if row.refine), None)
    first = None if index is None else _left(case, steps, tokens)
    if index is None or first is None:
        return steps
    size = len(first)

    def at(x: float) -> Steps:
        return (*steps[:index], (steps[index][0], x), *steps[index + 1 :])

    def residuals(x: Any) -> Any:
        left = _left(case, at(float(x[0])), tokens)
        # a value that predicts other tokens than the first value is refused
        return left.numpy() if left is not None and len(left) == size else np.full(size, MOST)

    fit = least_squares(residuals, [steps[index][1]], method="lm", diff_step=1e-4, ftol=1e-2, xtol=1e-10)
    return at(float(fit.x[0]))


def _left(case: Case, steps: Steps, tokens: Tokens) -> Tensor | None:
    """Return the errors that causes leave; None if fewer than a third of the tokens have a prediction."""
    left, usable = [], 0
    for values, w in zip(case.predictor(steps, tokens), tokens.windows, strict=True):
        at, numbers = slice(w.start, w.end), case.numbers[w.response]
        there = numbers.usable[at] & ~values.isnan()
        usable += int(numbers.usable[at].sum())
        left.append(errors(numbers.recorded[at][there], values[there], case.stored).cpu())
    joined = torch.cat(left)
    return joined if not steps or len(joined) >= max(4, usable / 3) else None


def _own(case: Case, row: Variant, tokens: Tokens) -> Tensor:
    """Return the 16-bit rounding (nats) in the numbers that a cause predicts, at the usable tokens."""
    exact: Steps = ((EXACT_LOGITS, 0.0),) if row.rounding == "logits" else ()
    both = zip(case.predictor(((row, 0.0),), tokens), case.predictor(exact, tokens), tokens.windows, strict=True)
    return torch.cat([(a - b)[case.numbers[w.response].usable[w.start : w.end]].cpu() for a, b, w in both])


def _judged(case: Case, steps: Steps, left: Tensor) -> Tried:
    given = f"{case.predictor.sampling.temperature:.4g}"
    words = [row.words.format(x=x, given=given) if row.change else row.words for row, x in steps]
    before = rms(case.plain) if steps else math.inf
    does = explains(left, before, case.tolerance)
    if case.stored.name and (does or not steps):
        words.append(f"rounded to {case.stored.name}")
    own = [rms(_own(case, row, case.some)) for row, _ in steps if row.rounding not in ("", "weights")]
    does = explains(left, before, case.tolerance, max(own, default=0.0))
    predicted = zip(case.predictor(steps, case.some), case.some.windows, strict=True)
    return Tried(
        words=" and ".join(words) or "as it is",
        advice="; ".join(dict.fromkeys(row.advice for row, _ in steps)) or CAUSES["coarse_records"].mend,
        left=rms(left),
        explains=does,
        deviations=sum(row.deviations for row, _ in steps),
        explains_zeros=does and all(_explains_zeros(case, values, w) for values, w in predicted),
        temperature=next((x for row, x in steps if row.is_temperature), None),
        is_option=len(steps) == 1 and steps[0][0].option_advice != "",
    )


def _explains_zeros(case: Case, values: Tensor, w: Window) -> bool:
    at, numbers = slice(w.start, w.end), case.numbers[w.response]
    return bool((values[numbers.counts[at] & (numbers.recorded[at] == 0)].abs() <= case.tolerance).all())


def _as_half(case: Case, steps: Steps, left: Tensor) -> list[Tried]:
    """Return an explanation with 16-bit rounding added, if the remaining errors have its size and its pattern.

    With experts there is none: a small error of any cause may choose other experts, which gives the same pattern.
    """
    judged = _judged(case, steps, left)
    is_excluded = case.has_experts or any(_is_half(row) for row, _ in steps)
    if judged.explains or is_excluded or (steps and rms(left) > HALF * rms(case.plain)):
        return []
    for row in [row for row in case.rows if row.rounding == "computed"]:
        own, weights = _own(case, row, case.some), _of_same_format(case.rows, row, "weights")[0]
        like = likeness(left, own, _own(case, weights, case.some))
        if not like:
            continue
        parts = _of_same_format(case.rows, row, "part")
        alike = [r.words for r in parts if correlation(left, _own(case, r, case.some)) > ALIKE * like]
        kind = row.format if sizes_apart(left, own) <= FORMATS_APART ** (1 / 3) else "16-bit"
        what = " or ".join([f"as large as {kind} rounding ({rms(own):.2g} nats rms)", *alike]) + ", with other bits"
        words = f"{judged.words} and {what}" if steps else what
        advice = f"{judged.advice}; " * bool(steps) + CAUSES["reduced_precision"].mend
        found = [Tried(words, advice, rms(left), True, judged.deviations + 1.5)]
        computed: Steps = ((row, 0.0), *steps)
        exact = _left(case, computed, case.some) if steps else None
        return found if exact is None else [_judged(case, computed, exact), *found]
    return []


def _of_same_format(rows: Sequence[Variant], row: Variant, rounding: Rounding) -> list[Variant]:
    """Return the causes that round to the format of `row`, of those that round what `rounding` says."""
    return [r for r in rows if r.rounding == rounding and r.format == row.format]


def _reordered(case: Case) -> list[Tried]:
    """Explain the numbers as log-probs of other responses, or of other tokens of the same response."""
    recorded = {i: case.numbers[i].recorded[case.numbers[i].usable].cpu() for i in case.wrong}
    expected = [numbers.reference[numbers.usable].cpu() for numbers in case.numbers]

    def fits(i: int, left: Tensor) -> bool:  # and what is right but for few tokens has no other order
        return explains(left, rms(recorded[i] - expected[i]), case.tolerance)

    def elsewhere(i: int) -> bool:
        a = recorded[i]
        others = (b for j, b in enumerate(expected) if j != i and len(a) == len(b) > 1)
        return any(fits(i, a - b) for b in others)

    def exchanged(i: int) -> bool:
        a, b = recorded[i].sort().values, expected[i].sort().values
        return len(a) > 2 and fits(i, a - b)

    found = ["the log-probs of other responses"] * all(map(elsewhere, case.wrong))
    found += ["the right numbers in another order within the response"] * all(map(exchanged, case.wrong))
    return [Tried(words, CAUSES["shuffled"].mend, 0.0, True, 1.5) for words in found]
