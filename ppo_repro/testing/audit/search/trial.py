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
from ppo_repro.testing.audit.measure import errors_of, rms
from ppo_repro.testing.audit.numbers import Numbers, RecordedChunk
from ppo_repro.testing.audit.search.combination import PLAIN, Combination
from ppo_repro.testing.audit.search.logits import Logits
from ppo_repro.testing.audit.search.predict import Predictor
from ppo_repro.testing.audit.search.windows import Tokens, WrongResponse, few_and_many
from ppo_repro.testing.audit.sides import WrongSide


@dataclass(frozen=True, eq=False)
class Candidate:
    """Causes and a value, and the errors [n] that they leave on some tokens, nats."""

    combination: Combination
    errors: Tensor

    @cached_property
    def left(self) -> float:
        """Return the rms of the errors, nats."""
        return rms(self.errors)


@dataclass(frozen=True)
class Trial:
    """Causes to try on a wrong side, and the tokens to try them on."""

    side: WrongSide
    tried_numbers: Sequence[Numbers]  # of the side, on the device of the model; usable are the tokens that are tried
    causes: tuple[Cause, ...]  # in the order of the stages, so that logits and softmax are computed once
    predictor: Predictor
    few: Tokens  # for all causes
    many: Tokens  # for the best causes

    @cached_property
    def plain(self) -> Candidate:
        """Return the errors of the side without any cause, on many tokens."""
        candidate = self.candidate(PLAIN, self.many)
        assert candidate is not None
        return candidate

    @property
    def count(self) -> int:
        """Return the number of usable tokens among many."""
        return sum(int(self.tried_numbers[w.response].usable[w.here].sum()) for w in self.many.windows)

    @property
    def wrong_alone(self) -> Trial:
        """Return the trial as if only the wrong tokens of the side were usable."""
        wrong = [replace(x, usable=x.are_wrong(self.side.tolerance)) for x in self.tried_numbers]
        return replace(self, tried_numbers=wrong)

    def candidate(self, combination: Combination, tokens: Tokens) -> Candidate | None:
        """Return what causes leave on some tokens; None if they predict too few of the tokens."""
        by_window = []
        usable = 0
        for values, w in zip(self.predictor(combination, tokens), tokens.windows, strict=True):
            numbers = self.tried_numbers[w.response]
            there = numbers.usable[w.here] & ~values.isnan()
            usable += int(numbers.usable[w.here].sum())
            by_window.append(errors_of(numbers.recorded[w.here][there], values[there], self.side.stored).cpu())
        errors = torch.cat(by_window)
        enough = max(limits.FEWEST_PREDICTED, usable / limits.PREDICTED_ONE_IN)
        return Candidate(combination, errors) if combination == PLAIN or len(errors) >= enough else None

    def chunks(self, combination: Combination, tokens: Tokens) -> list[RecordedChunk]:
        """Return the logits that causes compute, beside the numbers that this trial judges."""
        pairs = zip(self.predictor.logits.chunks(combination, tokens), tokens.windows, strict=True)
        return [RecordedChunk(chunk, self.tried_numbers[w.response]) for chunks, w in pairs for chunk in chunks]

    def narrow_errors(self, cause: Cause, tokens: Tokens) -> Tensor:
        """Return the 16-bit rounding (nats) in the numbers that a cause predicts, at the usable tokens."""
        assert cause.rounded is not None
        narrow = self.predictor(Combination((cause,)), tokens)
        exact = self.predictor(PLAIN if cause.rounded.exact is None else Combination((cause.rounded.exact,)), tokens)
        both = zip(narrow, exact, tokens.windows, strict=True)
        apart = [(a - b)[self.tried_numbers[w.response].usable[w.here]].cpu() for a, b, w in both]
        return torch.cat(apart)


def trial_of(model: PreTrainedModel, side: WrongSide, causes: Sequence[Cause]) -> Trial:
    """Return the trial of causes on a wrong side, without the causes of the input that predict none of the tokens."""
    recorded = side.recorded
    wrong = []
    for i in side.wrong_responses:
        x = recorded.numbers[i]
        wrong.append(WrongResponse(i, len(recorded.responses[i].prompt_ids), x.usable, x.are_wrong(side.tolerance)))
    few, many = few_and_many(wrong)
    numbers = [x.to(model.device) for x in recorded.numbers]
    logits = Logits(model, recorded.responses, [x.counts for x in numbers], recorded.sampling)
    return Trial(
        side=side,
        tried_numbers=numbers,
        causes=tuple(cause for cause in causes if _is_predicted(cause, few) and _is_predicted(cause, many)),
        predictor=Predictor(logits, recorded.definition, [x.reference for x in numbers]),
        few=few,
        many=many,
    )


def _is_predicted(cause: Cause, tokens: Tokens) -> bool:
    """Return whether a cause predicts any of the tokens; another input may predict few tokens of a response."""
    if not isinstance(cause, OtherInput):
        return True
    for w in tokens.windows:
        passes = cause.passes[w.response]
        if not passes or any(one.within(w.start, w.end) for one in passes):
            return True
    return False
