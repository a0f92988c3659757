"""Judge both sides: how far a side is from the right log-probs, and if it is wrong, what the search says about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.output import say
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause
from ppo_repro.testing.audit.distributions import EACH_CUT_OF_ALL
from ppo_repro.testing.audit.facts import facts, of_format
from ppo_repro.testing.audit.measure import rms
from ppo_repro.testing.audit.numbers import Numbers
from ppo_repro.testing.audit.search.hypothesis import Hypotheses, Hypothesis
from ppo_repro.testing.audit.search.search import causes_after_logits, causes_before_logits, search
from ppo_repro.testing.audit.search.trial import Trial, trial_of
from ppo_repro.testing.audit.sides import RecordedSide, largest_error
from ppo_repro.testing.audit.stack import StackModel
from ppo_repro.testing.audit.verdict import Distance, JudgedSide, Verdict
from ppo_repro.testing.dumps import impossible

FILL = "record a log-prob for every token that counts, and leave padding out by the mask"


def judged(stack: StackModel, recorded: Sequence[RecordedSide]) -> list[JudgedSide]:
    """Judge each side by its distance, and search the causes of a wrong one.

    If both sides are right, but for different orders of cuts, no side is right for the order of the other.
    """
    found, before_logits = list[JudgedSide](), list[Cause]()
    for side in recorded:
        distance = _distance(stack.model, side)
        if not distance.wrong_responses:
            found.append(_right(side, distance))
            continue
        say(f"audit: {side.name} is wrong; looks for the cause")
        before_logits = before_logits or causes_before_logits(stack, side.responses)  # once for both sides
        causes = [*before_logits, *causes_after_logits(side.sampling, side.definition)]
        trial = trial_of(stack.model, side, distance.wrong_responses, causes)
        found.append(_wrong(distance, trial, search(trial)))
    if all(side.has_own_order for side in recorded) and all(side.is_right for side in found):
        return [_of_its_order(side) for side in found]
    return found


def _of_its_order(side: JudgedSide) -> JudgedSide:
    order = ", each cut of all tokens" if side.definition == EACH_CUT_OF_ALL else ""
    return replace(side, verdict=Verdict("of its own order", f"{side.definition.words}{order}"))


def _distance(model: PreTrainedModel, side: RecordedSide) -> Distance:
    """Measure how far a side is, and which responses are wrong: none if the rms and single tokens are near enough."""
    limit, every = limits.RIGHT * side.reference.floor, torch.cat(side.errors)
    largest = float(every.abs().max()) if len(every) else math.nan
    # responses with a token that is far off, though stock float32 may be as far off there
    far = [i for i, d in enumerate(side.errors) if bool((d.abs() > limits.TOKEN_OVER_RMS * limit).any())]
    is_near = rms(every) <= limit
    are_tokens_near = not far or (is_near and largest <= limits.STOCK_LARGEST * largest_error(model, side, far))
    is_right = is_near and are_tokens_near
    wrong = [] if is_right else [i for i, d in enumerate(side.errors) if rms(d) > limit or i in far]
    return Distance(len(every), rms(every), largest, tuple(wrong))


def _right(side: RecordedSide, distance: Distance) -> JudgedSide:
    """Return the verdict about a side whose log-probs are right; tokens without a log-prob make it wrong."""
    gaps = _missing_or_zero(side.numbers)
    verdict = Verdict("explained", gaps.words, gaps.advice) if gaps.count else Verdict("right")
    return JudgedSide(side.name, side.definition, distance, gaps.count, verdict)


def _wrong(distance: Distance, trial: Trial, found: Hypotheses) -> JudgedSide:
    """Return the verdict about a wrong side from the hypotheses that were tried."""
    side, best = trial.side, found.best
    are_zeros_explained = bool(best) and best[0].explains_zeros
    gaps = _missing(side.numbers) if are_zeros_explained else _missing_or_zero(side.numbers)
    return JudgedSide(
        name=side.name,
        definition=side.definition,
        distance=distance,
        empty=gaps.count,
        verdict=_explained(best, trial, gaps) if 0 < len(best) <= limits.NAMED else _unknown(trial, gaps),
        best=tuple(best),
        tried=tuple(found.shown()),
        temperature=found.temperature(trial.tolerance),
    )


def _explained(best: Sequence[Hypothesis], trial: Trial, gaps: Gaps) -> Verdict:
    """Return the verdict that names the hypotheses which explain a side."""
    return Verdict(
        state="explained",
        cause=" and ".join(filter(None, (gaps.words, " or ".join(t.words for t in best)))),
        advice="; ".join(filter(None, (gaps.advice, best[0].advice))),
        left=best[0].left,
        known=tuple(of_format(trial.stored)) if trial.stored.mantissa else (),  # decimals are of no computation
    )


def _unknown(trial: Trial, gaps: Gaps) -> Verdict:
    """Return the verdict that describes the numbers of a side, and their errors."""
    side = trial.side
    why = gaps.words or impossible(_counted(side.numbers).float().numpy())
    found = facts(side.responses, side.numbers, trial.tolerance)
    known = *filter(None, [why]), *of_format(trial.stored), *found
    return Verdict("unknown", "unknown", gaps.advice, known=known)


# tokens without a log-prob


@dataclass(frozen=True)
class Gaps:
    """Tokens that count and have no log-prob."""

    count: int
    words: str  # "" if there are none

    @property
    def advice(self) -> str:
        """Return what to do about the tokens."""
        return FILL if self.count else ""


def _missing(numbers: Sequence[Numbers]) -> Gaps:
    """Return the tokens whose log-prob is not finite."""
    values = _counted(numbers)
    count = int((~values.isfinite()).sum())
    return Gaps(count, f"{count:,} of {len(values):,} tokens have no log-prob" if count else "")


def _missing_or_zero(numbers: Sequence[Numbers]) -> Gaps:
    """Return the tokens whose log-prob is not finite, or is exactly 0 though the token is not sure."""
    values = _counted(numbers)
    count, finite = len(values) - sum(int(one.usable.sum()) for one in numbers), values[values.isfinite()]
    if count and len(finite) and not bool(finite.any()):
        return Gaps(count, impossible(values.float().numpy()))
    return Gaps(count, f"{count:,} of {len(values):,} tokens have no log-prob or a 0" if count else "")


def _counted(numbers: Sequence[Numbers]) -> Tensor:
    return torch.cat([one.recorded[one.counts] for one in numbers])
