"""Search the causes of one wrong side: predict numbers from each cause, and measure whether the error left is rounding.

Every cause is a row (`causes.cause.Cause`). All rows, and then all pairs of rows of different stages, go through three
steps: `_screened` predicts a few tokens of the wrong side; `_passing` leaves the rows that come near there; `_compared`
predicts more tokens from these rows, and judges the errors that they leave (`hypothesis`, `rounding`). The search ends
as soon as something explains the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations
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
from ppo_repro.testing.audit.combination import CauseAt, Combination
from ppo_repro.testing.audit.distributions import Definition
from ppo_repro.testing.audit.forward import Progress
from ppo_repro.testing.audit.hypothesis import Hypotheses, Hypothesis, Pattern, best_of, hypothesis_of
from ppo_repro.testing.audit.logits import Tokens
from ppo_repro.testing.audit.measure import explains, rms
from ppo_repro.testing.audit.predict import source_of
from ppo_repro.testing.audit.rounding import with_rounding
from ppo_repro.testing.audit.stack import StackModel, StackSampling
from ppo_repro.testing.audit.tried_tokens import Trial, WrongSide
from ppo_repro.testing.dumps import DumpedResponse


def causes_before_logits(stack: StackModel, responses: Sequence[DumpedResponse]) -> list[Cause]:
    """Return the causes that change the model or its input; they are the same for both sides."""
    return [*of_weights(stack.model, stack.others), *of_inputs(responses, stack)]


def causes_after_logits(sampling: StackSampling, definition: Definition) -> list[Cause]:
    """Return the causes that follow the logits and whose presumption holds; `definition` is what is right."""
    rows = (*DISTRIBUTIONS, *RECORDED)
    return [cause for cause in rows if cause.presumes(sampling) and cause.change is not definition.change]


def search(trial: Trial) -> Hypotheses:
    """Return the hypotheses about all tried tokens; if none explains these, also those about the wrong tokens only."""
    whole, of_wrong = best_of(_tried(trial)), trial.wrong_alone
    if whole.best or not limits.FEWEST_NUMBERS <= of_wrong.count < limits.WRONG_ALONE * trial.count:
        return whole
    words = f"at {of_wrong.count} of {trial.count} tokens"
    part = best_of([replace(t, words=f"{words} {t.words}", temperature=None) for t in _tried(of_wrong) if t.explains])
    return Hypotheses(part.best, [*part.others, *whole.others])


def _tried(trial: Trial) -> list[Hypothesis]:
    """Try the stages of the search in turn, until a hypothesis explains."""
    tried = list[Hypothesis]()
    for stage in _stages(trial):
        tried += stage
        if any(t.explains for t in stage):
            break
    return tried


def _stages(trial: Trial) -> Iterator[list[Hypothesis]]:
    """Yield no cause, other orders and single causes; then 16-bit rounding; then pairs of causes."""
    singles, limit = _screened(trial, "causes", [(cause,) for cause in trial.causes]), _limit(trial)
    plain = hypothesis_of(trial, Combination(), trial.plain)
    yield [plain, *_reordered(trial.side), *_compared(trial, _passing(singles, limit))]
    yield with_rounding(trial, plain)
    near = {of.cause for candidate in singles if candidate.left <= limit for of in candidate.combination.causes}
    pairs = [pair for pair in combinations(trial.causes, 2) if _is_pair(*pair, near)]
    yield _compared(trial, _passing(_screened(trial, "pairs of causes", pairs), limit))


def _is_pair(a: Cause, b: Cause, near: Set[Cause]) -> bool:
    """Return whether to try both causes together: they replace different stages, and one has few values or none."""
    parameters = [cause.parameter for cause in (a, b) if cause.parameter is not None]
    if a.stage == b.stage or len(parameters) > 1 or any(p.in_pairs == 0 for p in parameters):
        return False
    if a.rounds("computed", "weights"):
        return b in near  # a 16-bit error is small, so its partner must come near alone
    return not a.is_option or b.stage == "distribution"  # options are many


# three steps, from all candidates to hypotheses: screen on few tokens, pass the best, compare on many tokens


@dataclass(frozen=True)
class Candidate:
    """Causes, and the errors [n] that they leave on some tokens, nats."""

    combination: Combination
    errors: Tensor

    @property
    def left(self) -> float:
        """Return the rms of the errors, nats."""
        return rms(self.errors)


def _screened(trial: Trial, what: str, combined: Sequence[tuple[Cause, ...]]) -> list[Candidate]:
    """Return the candidates on a few tokens, the nearest first: a few show that most causes are far off."""
    screened = list[Candidate]()
    progress = Progress(f"{trial.side.name}, {what}", len(combined))
    for causes in combined:
        combination = _with_value(trial, causes)
        screened += [] if combination is None else _fitted(trial, combination, trial.few)
        progress.step()
    return sorted(screened, key=lambda candidate: candidate.left)


def _passing(screened: Sequence[Candidate], limit: float) -> Sequence[Candidate]:
    """Return the candidates within the limit; if none is, the nearest few, which the verdict `unknown` lists."""
    passing = [candidate for candidate in screened if candidate.left <= limit]
    return passing[: limits.ON_ALL] if passing else screened[: limits.WORST]


def _compared(trial: Trial, passing: Sequence[Candidate]) -> list[Hypothesis]:
    """Return the hypotheses of candidates on more tokens: a cause that fits a few may not fit others."""
    found = []
    for some in passing:
        for candidate in _fitted(trial, some.combination, trial.many):
            alone = hypothesis_of(trial, candidate.combination, candidate.errors)
            found += [alone, *with_rounding(trial, alone)]
    return found


def _limit(trial: Trial) -> float:
    """Return the rms that a candidate may leave on a few tokens: the rounding of float32, or of 16 bits.

    A side may have two causes. If one is a 16-bit computation, the other cause alone leaves its rounding.
    """
    halves = (cause for cause in trial.causes if cause.rounds("computed", "weights"))
    rounding = (trial.side.scale * rms(trial.rounding(cause, trial.few)) for cause in halves)
    return limits.NEAR * max([limits.TOKEN_OVER_RMS * trial.side.tolerance, *rounding])


# the value of a parameter


def _with_value(trial: Trial, causes: tuple[Cause, ...]) -> Combination | None:
    """Return the causes with the proposed value that fits best on a few tokens; None if no value predicts enough.

    If two responses have log-probs of temperature 0.7, the temperature gets one value, 0.7, for both.
    """
    combination = Combination(tuple(CauseAt(cause) for cause in causes))
    if combination.parameter is None:
        return combination
    predictor, few = trial.predictor, trial.few
    pairs = zip(predictor.logits.chunks(source_of(combination, few)), few.windows, strict=True)
    chunks = [replace(chunk, numbers=trial.side.numbers[w.response]) for of_window, w in pairs for chunk in of_window]
    values = combination.parameter.values(chunks, predictor.sampling)
    options = [combination.with_value(x) for x in values[: combination.parameter.in_pairs if len(causes) > 1 else None]]
    left = [(rms(r), k) for k, option in enumerate(options) if (r := trial.left(option, few)) is not None]
    return options[min(left)[1]] if left else None


def _fitted(trial: Trial, combination: Combination, tokens: Tokens) -> list[Candidate]:
    """Return the candidate with its parameter fitted by least squares; none if too few tokens are predicted.

    A value that fits a few tokens may be off on more tokens, so each step fits it again.
    """
    first, parameter = trial.left(combination, tokens), combination.parameter
    if first is None:
        return []
    if parameter is None or not parameter.is_fitted:
        return [Candidate(combination, first)]
    size = len(first)

    def residuals(x: Any) -> Any:
        left = trial.left(combination.with_value(float(x[0])), tokens)
        # a value that predicts other tokens than the first value is refused
        return left.numpy() if left is not None and len(left) == size else np.full(size, limits.CLAMP)

    fit = least_squares(residuals, [combination.value], method="lm", diff_step=1e-4, ftol=1e-2, xtol=1e-10)
    fitted = combination.with_value(float(fit.x[0]))
    left = trial.left(fitted, tokens)
    return [] if left is None else [Candidate(fitted, left)]


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
            yield Hypothesis(
                Combination(), torch.cat(parts), True, words, ADVICE["shuffled"].mend, limits.PATTERN, pattern
            )
