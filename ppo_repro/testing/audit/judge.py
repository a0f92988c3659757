"""Judge both sides: how far a side is from the right log-probs, and if it is wrong, what the search says about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.output import say
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause
from ppo_repro.testing.audit.facts import facts, of_format
from ppo_repro.testing.audit.judged_side import Distance, Gaps, JudgedSide
from ppo_repro.testing.audit.measure import rms
from ppo_repro.testing.audit.numbers import Numbers
from ppo_repro.testing.audit.search.hypothesis import Hypotheses
from ppo_repro.testing.audit.search.search import causes_after_logits, causes_before_logits, search
from ppo_repro.testing.audit.search.trial import trial_of
from ppo_repro.testing.audit.sides import RecordedSide, WrongSide, largest_error
from ppo_repro.testing.audit.stack import StackModel
from ppo_repro.testing.dumps import impossible


def judged(stack: StackModel, recorded: Sequence[RecordedSide]) -> list[JudgedSide]:
    """Judge each side by its distance, and search the causes of a wrong one.

    If both sides are right, but for different orders of cuts, no side is right for the order of the other.
    """
    sides = list[JudgedSide]()
    before_logits = list[Cause]()
    for side in recorded:
        distance = _distance(stack.model, side)
        if not distance.wrong_responses:
            # tokens without a log-prob make a side wrong too
            sides.append(JudgedSide(side.name, side.definition, distance, _missing_or_zero(side.numbers)))
            continue
        say(f"audit: {side.name} is wrong; the audit looks for the cause")
        before_logits = before_logits or causes_before_logits(stack, side.responses)  # once for both sides
        causes = [*before_logits, *causes_after_logits(side.sampling, side.definition)]
        wrong = WrongSide(side, distance.wrong_responses)
        sides.append(_wrong(wrong, distance, search(trial_of(stack.model, wrong, causes))))
    if all(side.has_own_order for side in recorded) and all(side.is_right for side in sides):
        return [replace(side, has_own_order=True) for side in sides]
    return sides


def _distance(model: PreTrainedModel, side: RecordedSide) -> Distance:
    """Measure how far a side is, and which responses are wrong: none if the rms and single tokens are near enough."""
    limit = limits.RIGHT * side.reference.floor
    errors = torch.cat(side.errors)
    largest = float(errors.abs().max()) if len(errors) else math.nan
    # responses with a token that is far off, though stock float32 may be as far off there
    far = [i for i, x in enumerate(side.errors) if bool((x.abs() > limits.TOKEN_OVER_RMS * limit).any())]
    is_near = rms(errors) <= limit
    are_tokens_near = not far or (is_near and largest <= limits.STOCK_LARGEST * largest_error(model, side, far))
    is_right = is_near and are_tokens_near
    wrong = [] if is_right else [i for i, x in enumerate(side.errors) if rms(x) > limit or i in far]
    return Distance(len(errors), rms(errors), largest, tuple(wrong))


def _wrong(wrong: WrongSide, distance: Distance, hypotheses: Hypotheses) -> JudgedSide:
    """Judge a wrong side from the hypotheses that were tried."""
    side = wrong.recorded
    are_zeros_explained = bool(hypotheses.best) and hypotheses.best[0].explains_zeros
    gaps = _missing(side.numbers) if are_zeros_explained else _missing_or_zero(side.numbers)
    return JudgedSide(
        name=side.name,
        definition=side.definition,
        distance=distance,
        gaps=gaps,
        hypotheses=hypotheses,
        known=tuple(_beside_a_cause(wrong) if hypotheses.named else _without_a_cause(wrong, gaps)),
        temperature=hypotheses.temperature(wrong.tolerance),
    )


def _beside_a_cause(wrong: WrongSide) -> list[str]:
    """Return the format of the numbers that a computation may have; no computation rounds to decimals."""
    return of_format(wrong.stored) if wrong.stored.mantissa else []


def _without_a_cause(wrong: WrongSide, gaps: Gaps) -> list[str]:
    """Describe the numbers of a side, and their errors."""
    side = wrong.recorded
    why = gaps.words if gaps.count else impossible(_counted(side.numbers).float().numpy())
    return [*filter(None, [why]), *of_format(wrong.stored), *facts(side.responses, side.numbers, wrong.tolerance)]


# tokens without a log-prob


def _missing(numbers: Sequence[Numbers]) -> Gaps:
    """Return the tokens whose log-prob is not finite."""
    values = _counted(numbers)
    count = int((~values.isfinite()).sum())
    return Gaps(count, f"{count:,} of {len(values):,} tokens have no log-prob" if count else "")


def _missing_or_zero(numbers: Sequence[Numbers]) -> Gaps:
    """Return the tokens whose log-prob is not finite, or is exactly 0 though the token is not sure."""
    values = _counted(numbers)
    finite = values[values.isfinite()]
    count = len(values) - sum(int(x.usable.sum()) for x in numbers)
    if count and len(finite) and not bool(finite.any()):
        return Gaps(count, impossible(values.float().numpy()))
    return Gaps(count, f"{count:,} of {len(values):,} tokens have no log-prob or a 0" if count else "")


def _counted(numbers: Sequence[Numbers]) -> Tensor:
    return torch.cat([x.recorded[x.counts] for x in numbers])
