"""Search the causes of one wrong side: predict numbers from each cause, and measure whether the error left is rounding.

All causes, and then all pairs of causes of different stages, go through three steps. `_screened` predicts a few tokens
of the wrong side. `_passing` keeps the candidates that come near there. `_compared` predicts more tokens from these
candidates, and judges the errors that are left (`hypothesis`, `other_bits`). The search ends as soon as a hypothesis
explains the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause, Stage
from ppo_repro.testing.audit.causes.inputs import of_inputs
from ppo_repro.testing.audit.causes.models import of_models
from ppo_repro.testing.audit.causes.recorded import RECORDED
from ppo_repro.testing.audit.causes.softmax import DISTRIBUTIONS
from ppo_repro.testing.audit.distributions import Definition
from ppo_repro.testing.audit.forward import Progress
from ppo_repro.testing.audit.measure import rms
from ppo_repro.testing.audit.search.combination import Combination
from ppo_repro.testing.audit.search.hypothesis import Hypotheses, Hypothesis, hypotheses_of, hypothesis_of
from ppo_repro.testing.audit.search.orders import of_other_orders
from ppo_repro.testing.audit.search.other_bits import with_other_bits
from ppo_repro.testing.audit.search.trial import Candidate, Trial
from ppo_repro.testing.audit.search.windows import Tokens
from ppo_repro.testing.audit.stack import StackModel, StackSampling
from ppo_repro.testing.dumps import DumpedResponse


def causes_before_logits(stack: StackModel, responses: Sequence[DumpedResponse]) -> list[Cause]:
    """Return the causes that change the model or its input; they are the same for both sides."""
    return [*of_models(stack.model, stack.others), *of_inputs(responses, stack)]


def causes_after_logits(sampling: StackSampling, definition: Definition) -> list[Cause]:
    """Return the causes after the logits whose presumption holds; the right `definition` is no cause."""
    others = (cause for cause in DISTRIBUTIONS if cause.definition != definition)
    return [cause for cause in (*others, *RECORDED) if cause.presumes(sampling)]


def search(trial: Trial) -> Hypotheses:
    """Return the hypotheses about all tried tokens; if none explains these, also those about the wrong tokens only."""
    whole = hypotheses_of(_tried(trial))
    wrong_alone = trial.wrong_alone
    if whole.best or not limits.FEWEST_NUMBERS <= wrong_alone.count < limits.WRONG_ALONE * trial.count:
        return whole
    words = f"at {wrong_alone.count} of {trial.count} tokens"
    explaining = (t for t in _tried(wrong_alone) if t.explains)
    part = hypotheses_of([replace(t, words=f"{words} {t.words}", is_of_wrong_alone=True) for t in explaining])
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
    plain = hypothesis_of(trial, trial.plain)
    yield [plain, *of_other_orders(trial), *_compared(trial, _passing(singles, limit))]
    yield with_other_bits(trial, plain)
    near = {cause for candidate in singles if candidate.left <= limit for cause in candidate.combination.causes}
    pairs = [pair for pair in combinations(trial.causes, 2) if _is_pair(*pair, near)]
    yield _compared(trial, _passing(_screened(trial, "pairs of causes", pairs), limit))


def _is_pair(a: Cause, b: Cause, near: Set[Cause]) -> bool:
    """Return whether to try both causes together: they replace different stages, and one has few values or none.

    `a` comes before `b` in the order of the stages, because `trial.causes` has that order.
    """
    parameters = [cause.parameter for cause in (a, b) if cause.parameter is not None]
    if a.stage == b.stage or len(parameters) > 1 or any(p.in_pairs == 0 for p in parameters):
        return False
    if a.rounds("computed", "weights"):
        return b in near  # a 16-bit error is small, so its partner must come near alone
    return not a.is_option or b.stage == Stage.DISTRIBUTION  # options are many


# three steps, from all candidates to hypotheses: screen on few tokens, pass the best, compare on many tokens


def _screened(trial: Trial, what: str, combined: Sequence[tuple[Cause, ...]]) -> list[Candidate]:
    """Return the candidates on a few tokens, the nearest first: a few show that most causes are far off."""
    screened = list[Candidate]()
    progress = Progress(f"{trial.side.recorded.name}, {what}", len(combined))
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
    hypotheses = list[Hypothesis]()
    for some in passing:
        for candidate in _fitted(trial, some.combination, trial.many):
            alone = hypothesis_of(trial, candidate)
            hypotheses += [alone, *with_other_bits(trial, alone)]
    return hypotheses


def _limit(trial: Trial) -> float:
    """Return the rms that a candidate may leave on a few tokens: the rounding of float32, or of 16 bits.

    A side may have two causes. If one is a 16-bit computation, the other cause alone leaves its rounding.
    """
    halves = (cause for cause in trial.causes if cause.rounds("computed", "weights"))
    narrow = (trial.side.scale * rms(trial.narrow_errors(cause, trial.few)) for cause in halves)
    # 16 bits that overflow limit nothing
    return limits.NEAR * max([limits.TOKEN_OVER_RMS * trial.side.tolerance, *filter(math.isfinite, narrow)])


# the value of a parameter


def _with_value(trial: Trial, causes: tuple[Cause, ...]) -> Combination | None:
    """Return the causes with the proposed value that fits best on a few tokens; None if no value predicts enough.

    If two responses have log-probs of temperature 0.7, the temperature gets one value, 0.7, for both.
    """
    combination = Combination(causes)
    if combination.parameter is None:
        return combination
    most = combination.parameter.in_pairs if len(causes) > 1 else None
    values = combination.parameter.values(trial.chunks(combination, trial.few))[:most]
    options = (trial.candidate(replace(combination, value=x), trial.few) for x in values)
    fitting = [option for option in options if option is not None]
    return min(fitting, key=lambda option: option.left).combination if fitting else None


def _fitted(trial: Trial, combination: Combination, tokens: Tokens) -> list[Candidate]:
    """Return the candidate with its parameter fitted by least squares; none if too few tokens are predicted.

    A value that fits a few tokens may be off on more tokens, so each step fits it again.
    """
    first = trial.candidate(combination, tokens)
    parameter = combination.parameter
    if first is None or parameter is None or not parameter.is_fitted:
        return [] if first is None else [first]
    size = len(first.errors)

    def residuals(x: Any) -> Any:
        other = trial.candidate(replace(combination, value=float(x[0])), tokens)
        # a value that predicts other tokens than the first value is refused
        return other.errors.numpy() if other and len(other.errors) == size else np.full(size, limits.CLAMP)

    fit = least_squares(residuals, [combination.value], method="lm", diff_step=1e-4, ftol=1e-2, xtol=1e-10)
    fitted = trial.candidate(replace(combination, value=float(fit.x[0])), tokens)
    return [] if fitted is None else [fitted]
