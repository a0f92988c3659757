"""Search the causes of one wrong side: predict numbers from each cause, and measure whether the error left is rounding.

Every cause is a row (`causes.cause.Cause`). All rows, and then all pairs of rows of different stages, go through one
loop: predict a few tokens of the wrong side; predict more tokens from the rows that leave small errors there; judge
what they leave (`hypothesis`, `rounding`). The search ends as soon as something explains the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import combinations
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from ppo_repro.testing.advice import ADVICE
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause
from ppo_repro.testing.audit.causes.inputs import of_inputs
from ppo_repro.testing.audit.causes.recorded import RECORDED
from ppo_repro.testing.audit.causes.softmax import DISTRIBUTIONS
from ppo_repro.testing.audit.causes.weights import of_weights
from ppo_repro.testing.audit.distributions import Definition
from ppo_repro.testing.audit.forward import Progress
from ppo_repro.testing.audit.hypothesis import Hypotheses, Hypothesis, Pattern, best_of, hypothesis_of
from ppo_repro.testing.audit.logits import Source, Tokens
from ppo_repro.testing.audit.measure import explains, rms
from ppo_repro.testing.audit.predict import Combination
from ppo_repro.testing.audit.rounding import with_rounding
from ppo_repro.testing.audit.stack import StackModel, StackSampling
from ppo_repro.testing.audit.tried_tokens import WrongSide
from ppo_repro.testing.dumps import DumpedResponse


def causes_before_logits(stack: StackModel, responses: Sequence[DumpedResponse]) -> list[Cause]:
    """Return the causes that change the model or its input; they are the same for both sides."""
    return [*of_weights(stack.model, stack.others), *of_inputs(responses, stack)]


def causes_after_logits(sampling: StackSampling, definition: Definition) -> list[Cause]:
    """Return the causes that follow the logits and whose presumption holds; `definition` is what is right."""
    rows = (*DISTRIBUTIONS, *RECORDED)
    return [cause for cause in rows if cause.presumes(sampling) and cause.change is not definition.change]


def search(side: WrongSide) -> Hypotheses:
    """Return the hypotheses about all tried tokens; if none explains these, also those about the wrong tokens only."""
    whole, of_wrong = best_of(_tried(side)), side.wrong_alone
    if whole.best or not limits.FEWEST_NUMBERS <= of_wrong.count < limits.WRONG_ALONE * side.count:
        return whole
    words = f"at {of_wrong.count} of {side.count} tokens"
    part = best_of([replace(t, words=f"{words} {t.words}", temperature=None) for t in _tried(of_wrong) if t.explains])
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
    plain = hypothesis_of(side, (), side.plain)
    yield [plain, *_reordered(side), *_compared(side, singles, limit)]
    yield with_rounding(side, plain)
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
            alone = hypothesis_of(side, combination, left)
            found += [alone, *with_rounding(side, alone)]
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
    source = Source(stage.get("weights"), stage.get("input"), side.few)
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
