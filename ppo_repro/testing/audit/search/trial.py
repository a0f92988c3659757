"""A wrong side, the causes to try on it, and the errors that causes leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause, OtherInput
from ppo_repro.testing.audit.measure import Stored, errors_of, rms, stored_as
from ppo_repro.testing.audit.numbers import Numbers, RecordedChunk
from ppo_repro.testing.audit.search.combination import PLAIN, Combination, together
from ppo_repro.testing.audit.search.logits import Logits
from ppo_repro.testing.audit.search.predict import Predictor
from ppo_repro.testing.audit.search.windows import Tokens, WrongResponse, few_and_many
from ppo_repro.testing.audit.sides import RecordedSide


@dataclass(frozen=True)
class Candidate:
    """Causes, and the errors [n] that they leave on some tokens, nats."""

    combination: Combination
    errors: Tensor

    @cached_property
    def left(self) -> float:
        """Return the rms of the errors, nats."""
        return rms(self.errors)


@dataclass(frozen=True)
class Trial:
    """Causes to try on a wrong side, and the tokens to try them on."""

    side: RecordedSide
    tried_numbers: Sequence[Numbers]  # of the side, on the device of the model; usable are the tokens that are tried
    wrong_responses: Sequence[int]
    stored: Stored  # the format of the numbers
    scale: float  # how many times as large as log-probs the numbers are, as sums are; they round as much more
    tolerance: float  # rms of rounding, nats
    causes: tuple[Cause, ...]  # in the order of the stages, so that logits and softmax are computed once
    predictor: Predictor
    few: Tokens  # for all causes
    many: Tokens  # for the best causes

    @cached_property
    def plain(self) -> Candidate:
        """Return what no cause leaves on many tokens."""
        found = self.candidate(PLAIN, self.many)
        assert found is not None
        return found

    @property
    def count(self) -> int:
        """Return the number of usable tokens among many."""
        return sum(int(self.tried_numbers[w.response].usable[w.here].sum()) for w in self.many.windows)

    @property
    def wrong_alone(self) -> Trial:
        """Return the trial as if only the wrong tokens of the side were usable."""
        wrong = [replace(one, usable=one.are_wrong(self.tolerance)) for one in self.tried_numbers]
        return replace(self, tried_numbers=wrong)

    def candidate(self, combination: Combination, tokens: Tokens) -> Candidate | None:
        """Return what causes leave on some tokens; None if they predict too few of the tokens."""
        found, usable = [], 0
        for values, w in zip(self.predictor(combination, tokens), tokens.windows, strict=True):
            numbers = self.tried_numbers[w.response]
            there = numbers.usable[w.here] & ~values.isnan()
            usable += int(numbers.usable[w.here].sum())
            found.append(errors_of(numbers.recorded[w.here][there], values[there], self.stored).cpu())
        errors = torch.cat(found)
        enough = max(limits.FEWEST_PREDICTED, usable / limits.PREDICTED_ONE_IN)
        return Candidate(combination, errors) if combination == PLAIN or len(errors) >= enough else None

    def chunks(self, combination: Combination, tokens: Tokens) -> list[RecordedChunk]:
        """Return the logits that causes compute, beside the numbers that this trial judges."""
        pairs = zip(self.predictor.logits.chunks(combination, tokens), tokens.windows, strict=True)
        return [RecordedChunk(chunk, self.tried_numbers[w.response]) for chunks, w in pairs for chunk in chunks]

    def narrow_errors(self, cause: Cause, tokens: Tokens) -> Tensor:
        """Return the 16-bit rounding (nats) in the numbers that a cause predicts, at the usable tokens."""
        assert cause.rounded is not None
        narrow = self.predictor(together(cause), tokens)
        exact = self.predictor(Combination(distribution=cause.rounded.exact), tokens)
        both = zip(narrow, exact, tokens.windows, strict=True)
        apart = [(a - b)[self.tried_numbers[w.response].usable[w.here]].cpu() for a, b, w in both]
        return torch.cat(apart)


def trial_of(model: PreTrainedModel, side: RecordedSide, wrong: Sequence[int], causes: Sequence[Cause]) -> Trial:
    """Return the trial of `causes` on a wrong side.

    `wrong` are the indices of the responses with a wrong log-prob. A cause of the input is left out if it predicts none
    of the tokens.
    """
    numbers = side.numbers
    every = torch.cat([numbers[i].recorded[numbers[i].usable] for i in wrong])
    ideal = torch.cat([numbers[i].reference[numbers[i].usable] for i in wrong])
    scale = max(1.0, rms(every) / max(rms(ideal), 1e-9))
    tolerance = limits.RIGHT * side.reference.floor * scale + limits.RECORDED * rms(every)
    few, many = few_and_many(
        [
            WrongResponse(i, len(side.responses[i].prompt_ids), numbers[i].usable, numbers[i].are_wrong(tolerance))
            for i in wrong
        ]
    )
    numbers = [one.to(model.device) for one in numbers]
    logits = Logits(model, side.responses, [one.counts for one in numbers], side.sampling)
    return Trial(
        side=side,
        tried_numbers=numbers,
        wrong_responses=wrong,
        stored=stored_as(every),
        scale=scale,
        tolerance=tolerance,
        causes=tuple(cause for cause in causes if _is_predicted(cause, few) and _is_predicted(cause, many)),
        predictor=Predictor(logits, side.definition, [one.reference for one in numbers]),
        few=few,
        many=many,
    )


def _is_predicted(cause: Cause, tokens: Tokens) -> bool:
    if not isinstance(cause, OtherInput):
        return True
    windows = ((w, cause.passes[w.response]) for w in tokens.windows)
    return any(not passes or any(one.within(w.start, w.end) for one in passes) for w, passes in windows)
