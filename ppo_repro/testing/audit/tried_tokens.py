"""A wrong side on the tokens that causes are tried on, and the errors that causes leave there.

The tokens are windows of neighbouring tokens that begin shortly before the first wrong token of a response: a few for
all causes, many for the causes that leave small errors there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause, Numbers
from ppo_repro.testing.audit.combination import CauseAt, Combination
from ppo_repro.testing.audit.logits import Logits, Tokens, Window
from ppo_repro.testing.audit.measure import Stored, errors, rms, stored_as
from ppo_repro.testing.audit.predict import Predictor
from ppo_repro.testing.audit.reference import RecordedSide


@dataclass(frozen=True)
class WrongSide:
    """The numbers that a wrong side recorded."""

    name: str
    numbers: Sequence[Numbers]  # of each response
    wrong: Sequence[int]  # responses with a wrong log-prob
    stored: Stored
    scale: float  # of the numbers: sums of many log-probs round more
    tolerance: float  # rms of rounding, nats


@dataclass(frozen=True)
class Trial:
    """Causes to try on a wrong side, and the tokens to try them on."""

    side: WrongSide
    causes: tuple[Cause, ...]  # in the order of the stages: so logits and softmax are computed once
    predictor: Predictor
    few: Tokens  # for all causes
    many: Tokens  # for the best causes

    @cached_property
    def plain(self) -> Tensor:
        """Return the errors of the tokens that the best causes are tried on, without a cause."""
        left = self.left(Combination(), self.many)
        assert left is not None
        return left

    @property
    def count(self) -> int:
        """Return the number of usable tokens that the best causes are tried on."""
        return sum(int(self.side.numbers[w.response].usable[w.start : w.end].sum()) for w in self.many.windows)

    @property
    def wrong_alone(self) -> Trial:
        """Return the trial as if only the wrong tokens of the side were usable."""
        numbers = [replace(of, usable=of.wrong(self.side.tolerance)) for of in self.side.numbers]
        return replace(self, side=replace(self.side, numbers=numbers))

    def left(self, combination: Combination, tokens: Tokens) -> Tensor | None:
        """Return the errors that causes leave; None if they predict too few of the tokens."""
        left, usable = [], 0
        for values, w in zip(self.predictor(combination, tokens), tokens.windows, strict=True):
            at, numbers = slice(w.start, w.end), self.side.numbers[w.response]
            there = numbers.usable[at] & ~values.isnan()
            usable += int(numbers.usable[at].sum())
            left.append(errors(numbers.recorded[at][there], values[there], self.side.stored).cpu())
        joined = torch.cat(left)
        enough = max(limits.FEWEST_PREDICTED, usable / limits.PREDICTED_ONE_IN)
        return joined if not combination.causes or len(joined) >= enough else None

    def rounding(self, cause: Cause, tokens: Tokens) -> Tensor:
        """Return the 16-bit rounding (nats) in the numbers that a cause predicts, at the usable tokens."""
        assert cause.rounded is not None
        exact = () if cause.rounded.exact is None else (CauseAt(cause.rounded.exact),)
        narrow = self.predictor(Combination((CauseAt(cause),)), tokens)
        both = zip(narrow, self.predictor(Combination(exact), tokens), tokens.windows, strict=True)
        return torch.cat([(a - b)[self.side.numbers[w.response].usable[w.start : w.end]].cpu() for a, b, w in both])


def trial_of(model: PreTrainedModel, side: RecordedSide, wrong: Sequence[int], causes: Sequence[Cause]) -> Trial:
    """Return the trial of `causes` on a wrong side.

    `wrong` are the indices of the responses with a wrong log-prob. A cause of the input is left out if it predicts none
    of the tokens.
    """
    prompts, numbers = [len(r.prompt_ids) for r in side.responses], side.numbers
    every = torch.cat([numbers[i].recorded[numbers[i].usable] for i in wrong])
    ideal = torch.cat([numbers[i].reference[numbers[i].usable] for i in wrong])
    scale = max(1.0, rms(every) / max(rms(ideal), 1e-9))
    tolerance = limits.RIGHT * side.reference.floor * scale + limits.RECORDED * rms(every)
    device = model.device
    numbers = [Numbers(*(x.to(device) for x in (of.recorded, of.usable, of.counts, of.reference))) for of in numbers]
    some = [_WrongResponse(i, prompts[i], numbers[i].usable, numbers[i].wrong(tolerance)) for i in wrong]
    few, many = _tokens(some)
    return Trial(
        side=WrongSide(side.name, numbers, wrong, stored_as(every), scale, tolerance),
        causes=tuple(cause for cause in causes if _is_predicted(cause, few) and _is_predicted(cause, many)),
        predictor=Predictor(Logits(model, side.responses, numbers), side.sampling, side.definition.change),
        few=Tokens(few, is_screening=True),
        many=Tokens(many),
    )


def _is_predicted(cause: Cause, windows: Sequence[Window]) -> bool:
    if cause.stage != "input":
        return True
    return any(one.within(w.start, w.end) for w in windows for one in cause.change[w.response])


@dataclass(frozen=True)
class _WrongResponse:
    """A response with a wrong log-prob."""

    index: int
    prompt: int  # tokens of the prompt
    usable: Tensor  # bool [n]
    is_wrong: Tensor  # bool [n]

    @cached_property
    def first(self) -> int:
        """Return the first wrong token."""
        return int((self.is_wrong.nonzero()[:1, 0].tolist() or [0])[0])


def _tokens(wrong: Sequence[_WrongResponse]) -> tuple[tuple[Window, ...], tuple[Window, ...]]:
    """Return the windows for all causes, and the windows for the best causes."""
    window, long, tried = limits.WINDOW, limits.LONG_WINDOW, limits.TRIED
    few = _windows(wrong, window, limits.SCREENED, window)
    many = _windows(wrong, max(long, math.ceil(tried / len(wrong))), tried, tried)
    last = many[-1]
    size = next(len(of.usable) for of in wrong if of.index == last.response)
    if size > last.end:  # a cause has to be right at the end of a response too
        many += (Window(last.response, max(last.end, size - long), size),)
    return few, many


def _windows(wrong: Sequence[_WrongResponse], length: int, enough: int, enough_wrong: int) -> tuple[Window, ...]:
    """Return windows until they have `enough` usable tokens, or `enough_wrong` wrong ones.

    A window has `length` tokens, or up to twice as many if they are the rest of the response. Responses with few tokens
    before their window come first, for short passes.
    """
    found, usable, count, most_right = list[Window](), 0, 0, limits.WINDOW
    for of in sorted(wrong, key=lambda of: max(of.first, most_right) + of.prompt):
        if usable < enough and count < enough_wrong:
            start, whole = max(0, of.first - min(most_right, length // 2)), len(of.usable)
            end = whole if whole - start <= 2 * length else start + length
            found.append(Window(of.index, start, end))
            usable += int(of.usable[start:end].sum())
            count += int(of.is_wrong[start:end].sum())
    return tuple(found)
