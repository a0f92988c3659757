"""Search the causes of one wrong side: predict numbers from each cause, and measure whether the error left is rounding.

Every cause is a row (`causes.cause.Cause`). All rows, and then all pairs of rows of different stages, go through one
loop: predict a few tokens of the wrong side; predict more tokens from the rows that leave small errors there; measure
what they leave (`measure.explains`). The search ends as soon as something explains the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from ppo_repro.testing.advice import ADVICE
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import UNCHANGED, Cause, Rounded, RoundedPart
from ppo_repro.testing.audit.causes.inputs import of_inputs
from ppo_repro.testing.audit.causes.recorded import RECORDED
from ppo_repro.testing.audit.causes.softmax import DISTRIBUTIONS
from ppo_repro.testing.audit.causes.weights import of_weights
from ppo_repro.testing.audit.distributions import Definition
from ppo_repro.testing.audit.forward import Progress
from ppo_repro.testing.audit.logits import Source, Tokens
from ppo_repro.testing.audit.measure import Format, correlation, explains, likeness, rms, sizes_apart
from ppo_repro.testing.audit.predict import Combination
from ppo_repro.testing.audit.stack import StackModel, StackSampling
from ppo_repro.testing.audit.tried_tokens import WrongSide
from ppo_repro.testing.dumps import DumpedResponse

# of errors that causes leave, or of the numbers of a side
Pattern = Literal["none", "like 16-bit rounding", "of other responses", "of other tokens"]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """Causes that were tried on a wrong side, and what they leave of its errors."""

    causes: Combination  # whose numbers were compared; () for none
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
        """Return what tells it from other hypotheses; other values of parameters make no other hypothesis."""
        return self.pattern, tuple(cause.row(x) for cause, x in self.causes)

    @property
    def left(self) -> float:
        """Return the rms of the errors that are left, nats."""
        return rms(self.errors)


@dataclass(frozen=True)
class Hypotheses:
    """Hypotheses about a wrong side, each once: the best ones explain it with the fewest deviations, if any does."""

    best: list[Hypothesis]
    others: list[Hypothesis]  # those that leave the smallest errors first


def causes_before_logits(stack: StackModel, responses: Sequence[DumpedResponse]) -> list[Cause]:
    """Return the causes that change the model or its input; they are the same for both sides."""
    return [*of_weights(stack.model, stack.others), *of_inputs(responses, stack)]


def causes_after_logits(sampling: StackSampling, definition: Definition) -> list[Cause]:
    """Return the causes that follow the logits and whose presumption holds; `definition` is what is right."""
    rows = (*DISTRIBUTIONS, *RECORDED)
    return [cause for cause in rows if cause.presumes(sampling) and cause.change is not definition.change]


def search(side: WrongSide) -> Hypotheses:
    """Return the hypotheses about all tried tokens; if none explains these, also those about the wrong tokens only."""
    whole, of_wrong = _sorted(_tried(side)), side.wrong_alone
    if whole.best or not limits.FEWEST_NUMBERS <= of_wrong.count < limits.WRONG_ALONE * side.count:
        return whole
    words = f"at {of_wrong.count} of {side.count} tokens"
    part = _sorted([replace(t, words=f"{words} {t.words}", temperature=None) for t in _tried(of_wrong) if t.explains])
    return Hypotheses(part.best, [*part.others, *whole.others])


def _tried(side: WrongSide) -> list[Hypothesis]:
    """Try the stages of the search in turn, until a hypothesis explains."""
    tried = list[Hypothesis]()
    for stage in _stages(side):
        tried += stage
        if any(t.explains for t in stage):
            break
    return tried


def _stages(side: WrongSide) -> Iterator[list[Hypothesis]]:
    """Yield no cause, other orders and single causes; then 16-bit rounding; then pairs of causes."""
    singles, limit = _screened(side, "causes", [(cause,) for cause in side.causes]), _limit(side)
    plain = _hypothesis(side, (), side.plain)
    yield [plain, *_reordered(side), *_compared(side, singles, limit)]
    yield _with_rounding(side, plain)
    near = {combination[0][0] for left, combination in singles if left <= limit}
    pairs = [pair for pair in combinations(side.causes, 2) if _is_pair(*pair, near)]
    yield _compared(side, _screened(side, "pairs of causes", pairs), limit)


def _is_pair(a: Cause, b: Cause, near: Set[Cause]) -> bool:
    """Return whether to try both causes together: they replace different stages, and one has few values or none."""
    parameters = [cause.parameter for cause in (a, b) if cause.parameter is not None]
    if a.stage == b.stage or len(parameters) > 1 or any(p.in_pairs == 0 for p in parameters):
        return False
    if a.rounds("computed", "weights"):
        return b in near  # a 16-bit error is small, so its partner must come near alone
    return not a.is_option or b.stage == "distribution"  # options are many


# the loop


def _compared(side: WrongSide, screened: Sequence[tuple[float, Combination]], limit: float) -> list[Hypothesis]:
    """Return the hypotheses of the best screened causes, compared on all tried tokens."""
    passing = [combination for left, combination in screened if left <= limit]
    found = []
    for some in passing[: limits.ON_ALL] or [combination for _, combination in screened[: limits.WORST]]:
        combination = _fitted(side, some, side.many)
        left = side.left(combination, side.many)
        if left is not None:
            alone = _hypothesis(side, combination, left)
            found += [alone, *_with_rounding(side, alone)]
    return found


def _limit(side: WrongSide) -> float:
    """Return the rms that a cause may leave on a few tokens to pass the screening."""
    halves = (cause for cause in side.causes if cause.rounds("computed", "weights"))
    rounding = (side.scale * rms(side.rounding(cause, side.few)) for cause in halves)
    return limits.NEAR * max([limits.TOKEN_OVER_RMS * side.tolerance, *rounding])


def _screened(side: WrongSide, what: str, combined: Sequence[tuple[Cause, ...]]) -> list[tuple[float, Combination]]:
    """Return the rms that each combination leaves on a few tokens, with the values of its parameters, in order."""
    screened: list[tuple[float, Combination]] = []
    progress = Progress(f"{side.name}, {what}", len(combined))
    for causes in combined:
        combination = _with_values(side, causes)
        left = None if combination is None else side.left(combination, side.few)
        if combination is not None and left is not None:
            screened.append((rms(left), combination))
        progress.step()
    return sorted(screened, key=itemgetter(0))


def _with_values(side: WrongSide, causes: tuple[Cause, ...]) -> Combination | None:
    """Return the causes with the parameter that fits best on a few tokens; None if no value is proposed.

    If two responses have log-probs of temperature 0.7, `(temperature,)` becomes `((temperature, 0.7),)`, one for both.
    """
    plain = tuple((cause, 0.0) for cause in causes)
    index = next((k for k, cause in enumerate(causes) if cause.parameter is not None), None)
    if index is None:
        return plain
    parameter, stage = causes[index].parameter, {cause.stage: cause for cause in causes}
    assert parameter is not None
    source = Source(stage.get("weights", UNCHANGED), stage.get("input", UNCHANGED), side.few)
    pairs = zip(side.predictor.logits.chunks(source), side.few.windows, strict=True)
    chunks = [replace(chunk, numbers=side.numbers[w.response]) for of_window, w in pairs for chunk in of_window]
    values = parameter.values(chunks, side.predictor.sampling)[: parameter.in_pairs if len(causes) > 1 else None]
    options = [_at(plain, index, x) for x in values]
    left = [(rms(r), k) for k, option in enumerate(options) if (r := side.left(option, side.few)) is not None]
    return _fitted(side, options[min(left)[1]], side.few) if left else None


def _at(combination: Combination, index: int, x: float) -> Combination:
    """Return the combination with another value of one parameter."""
    return (*combination[:index], (combination[index][0], x), *combination[index + 1 :])


def _fitted(side: WrongSide, combination: Combination, tokens: Tokens) -> Combination:
    """Return the combination after a least-squares fit of its parameter, if that is fitted and predicts numbers."""
    fitted = (
        k for k, (cause, _) in enumerate(combination) if cause.parameter is not None and cause.parameter.is_fitted
    )
    index = next(fitted, None)
    first = None if index is None else side.left(combination, tokens)
    if index is None or first is None:
        return combination
    size = len(first)

    def residuals(x: Any) -> Any:
        left = side.left(_at(combination, index, float(x[0])), tokens)
        # a value that predicts other tokens than the first value is refused
        return left.numpy() if left is not None and len(left) == size else np.full(size, limits.CLAMP)

    fit = least_squares(residuals, [combination[index][1]], method="lm", diff_step=1e-4, ftol=1e-2, xtol=1e-10)
    return _at(combination, index, float(fit.x[0]))


# does a hypothesis explain the numbers


def _hypothesis(side: WrongSide, causes: Combination, left: Tensor) -> Hypothesis:
    """Return the hypothesis that these causes alone leave the errors `left` on all tried tokens."""
    given = f"{side.predictor.sampling.temperature:.4g}"
    words = [cause.words.format(x=x, given=given) if cause.change else cause.words for cause, x in causes]
    before = rms(side.plain) if causes else math.inf
    if side.stored.name and (explains(left, before, side.tolerance) or not causes):
        words.append(f"rounded to {side.stored.name}")
    rounded = (
        rms(side.rounding(cause, side.many)) for cause, _ in causes if cause.rounds("computed", "part", "logits")
    )
    does = explains(left, before, side.tolerance, max(rounded, default=0.0))
    temperatures = (x for cause, x in causes if cause.parameter is not None and cause.parameter.is_temperature)
    return Hypothesis(
        causes=causes,
        errors=left,
        explains=does,
        words=" and ".join(words) or "as it is",
        advice="; ".join(dict.fromkeys(cause.advice for cause, _ in causes)) or ADVICE["coarse_records"].mend,
        deviations=sum(cause.deviations for cause, _ in causes),
        explains_zeros=does and _explains_zeros(side, causes),
        temperature=next(temperatures, None),
        is_option=len(causes) == 1 and causes[0][0].is_option,
    )


def _explains_zeros(side: WrongSide, combination: Combination) -> bool:
    predicted = list[Tensor]()
    for values, w in zip(side.predictor(combination, side.many), side.many.windows, strict=True):
        at, numbers = slice(w.start, w.end), side.numbers[w.response]
        predicted.append(values[numbers.counts[at] & (numbers.recorded[at] == 0)])
    return bool((torch.cat(predicted).abs() <= side.tolerance).all())


def _with_rounding(side: WrongSide, alone: Hypothesis) -> list[Hypothesis]:
    """Return the hypotheses that the errors left by `alone` are 16-bit rounding, if they look like it.

    With experts there is none: a small error of any cause may choose other experts, which gives the same pattern.
    """
    is_rounded = any(cause.rounds("computed", "weights") for cause, _ in alone.causes)
    is_far = bool(alone.causes) and alone.left > limits.OF_ERRORS * rms(side.plain)
    if alone.explains or side.has_experts or is_rounded or is_far:
        return []
    for cause in (cause for cause in side.causes if cause.rounds("computed")):
        words, mend = _like_rounding(side, cause, alone.errors), ADVICE["reduced_precision"].mend
        if not words:
            continue
        similar = Hypothesis(
            causes=alone.causes,
            errors=alone.errors,
            explains=True,
            words=f"{alone.words} and {words}" if alone.causes else words,
            advice=f"{alone.advice}; {mend}" if alone.causes else mend,
            deviations=alone.deviations + limits.PATTERN,
            pattern="like 16-bit rounding",
        )
        together = (cause, 0.0), *alone.causes
        left = side.left(together, side.many) if alone.causes else None
        return [similar] if left is None else [_hypothesis(side, together, left), similar]
    return []


def _like_rounding(side: WrongSide, computed: Cause, left: Tensor) -> str:
    """Return the words for errors that have the size and the pattern of a 16-bit computation's rounding; else "".

    They are "as large as bfloat16 rounding (0.017 nats rms) or router computed in bfloat16, with other bits" if a
    router in bfloat16 gives that pattern too.
    """
    assert computed.rounded is not None
    rounding, (weights,) = side.rounding(computed, side.many), _of_format(side.causes, "weights", computed.rounded.to)
    like = likeness(left, rounding, side.rounding(weights, side.many))
    if not like:
        return ""
    parts = _of_format(side.causes, "part", computed.rounded.to)
    alike = [p.words for p in parts if correlation(left, side.rounding(p, side.many)) > limits.ALIKE * like]
    kind = computed.rounded.to if sizes_apart(left, rounding) <= limits.FORMATS_APART ** (1 / 3) else "16-bit"
    words = " or ".join([f"as large as {kind} rounding ({rms(rounding):.2g} nats rms)", *alike])
    return f"{words}, with other bits"


def _of_format(causes: Sequence[Cause], what: RoundedPart, to: Format) -> list[Cause]:
    """Return the causes that round `what` to a format."""
    return [cause for cause in causes if cause.rounded == Rounded(what, to)]


# other orders of the right numbers


def _reordered(side: WrongSide) -> Iterator[Hypothesis]:
    """Yield the hypotheses that the numbers are log-probs of other responses, or of other tokens of the response."""
    recorded = [of.recorded[of.usable].cpu() for of in side.numbers]
    right = [of.reference[of.usable].cpu() for of in side.numbers]

    def fits(i: int, left: Tensor) -> bool:
        # what is right but for few tokens has no other order
        return explains(left, rms(recorded[i] - right[i]), side.tolerance)

    def of_other_response(i: int) -> Tensor | None:
        size = len(recorded[i])
        others = (recorded[i] - x for j, x in enumerate(right) if j != i and size == len(x) > 1)
        return next((left for left in others if fits(i, left)), None)

    def of_other_tokens(i: int) -> Tensor | None:
        left = recorded[i].sort().values - right[i].sort().values
        return left if len(left) > 2 and fits(i, left) else None

    orders: tuple[tuple[Pattern, str, Callable[[int], Tensor | None]], ...] = (
        ("of other responses", "the log-probs of other responses", of_other_response),
        ("of other tokens", "the right numbers in another order within the response", of_other_tokens),
    )
    for pattern, words, order in orders:
        parts = list[Tensor]()
        for i in side.wrong:
            if (left := order(i)) is None:
                break
            parts.append(left)
        else:
            yield Hypothesis((), torch.cat(parts), True, words, ADVICE["shuffled"].mend, limits.PATTERN, pattern)


# which hypotheses are the best


def _sorted(tried: Sequence[Hypothesis]) -> Hypotheses:
    """Leave out duplicates, and tell the hypotheses that explain with the fewest deviations from the others.

    An option of the model may predict the same numbers as a fitted parameter (a divisor of the logits acts as a
    temperature). Then both are among the best.
    """
    once: dict[tuple[Pattern, tuple[Cause, ...]], Hypothesis] = {}
    for t in sorted(tried, key=lambda t: (t.deviations, not t.explains, t.left)):
        if t.explains and not once.get(t.identity, t).explains:
            once[t.identity] = t
        # another cause beside one that leaves the same explains nothing more
        elif t.explains or not any(math.isclose(t.left, other.left, rel_tol=1e-3) for other in once.values()):
            once.setdefault(t.identity, t)
    fewest = min((t.deviations for t in tried if t.explains), default=0.0)
    fewest += limits.PER_PARAMETER * any(t.explains and t.is_option for t in tried)
    by_left = sorted(once.values(), key=lambda t: t.left)
    best = [t for t in by_left if t.explains and t.deviations <= fewest]
    return Hypotheses(best, [t for t in by_left if t not in best])
