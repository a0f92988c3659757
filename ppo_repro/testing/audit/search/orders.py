"""Hypotheses without a cause: the right numbers in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ppo_repro.testing.advice import ADVICE
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.measure import errors, explains, rms
from ppo_repro.testing.audit.search.combination import Combination
from ppo_repro.testing.audit.search.hypothesis import Hypothesis, Pattern
from ppo_repro.testing.audit.search.trial import Candidate, WrongSide


def of_other_orders(side: WrongSide) -> Iterator[Hypothesis]:
    """Yield the hypotheses that the numbers are log-probs of other responses, or of other tokens of the response."""
    recorded = [one.recorded[one.usable].cpu() for one in side.numbers]
    right = [one.reference[one.usable].cpu() for one in side.numbers]

    def fits(i: int, left: Tensor) -> bool:
        # if only few tokens are wrong, the numbers are in the right order
        return explains(left, rms(errors(recorded[i], right[i], side.stored)), side.tolerance)

    def of_other_response(i: int) -> Tensor | None:
        size = len(recorded[i])
        others = (errors(recorded[i], x, side.stored) for j, x in enumerate(right) if j != i and size == len(x) > 1)
        return next((left for left in others if fits(i, left)), None)

    def of_other_tokens(i: int) -> Tensor | None:
        left = errors(recorded[i].sort().values, right[i].sort().values, side.stored)
        return left if len(left) > 2 and fits(i, left) else None

    orders: tuple[tuple[Pattern, str, Callable[[int], Tensor | None]], ...] = (
        ("of other responses", "the log-probs of other responses", of_other_response),
        ("of other tokens", "the right numbers in another order within the response", of_other_tokens),
    )
    for pattern, words, order in orders:
        parts = list[Tensor]()
        for i in side.wrong_responses:
            if (left := order(i)) is None:
                break
            parts.append(left)
        else:
            yield Hypothesis(
                candidate=Candidate(Combination(), torch.cat(parts)),
                explains=True,
                words=words,
                advice=ADVICE["shuffled"].mend,
                deviations=limits.PATTERN,
                pattern=pattern,
            )
