"""Hypotheses without a cause: the right numbers in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ppo_repro.testing.audit.measure import errors_of, is_rounding, rms
from ppo_repro.testing.audit.search.combination import PLAIN
from ppo_repro.testing.audit.search.hypothesis import Hypothesis, Pattern
from ppo_repro.testing.audit.search.trial import Trial


def of_other_orders(trial: Trial) -> Iterator[Hypothesis]:
    """Yield the hypotheses that the numbers are log-probs of other responses, or of other tokens of the response."""
    recorded = [one.recorded[one.usable].cpu() for one in trial.tried_numbers]
    right = [one.reference[one.usable].cpu() for one in trial.tried_numbers]
    stored = trial.side.stored

    def fits(i: int, errors: Tensor) -> bool:
        # if only few tokens are wrong, the numbers are in the right order
        return is_rounding(errors, rms(errors_of(recorded[i], right[i], stored)), trial.side.tolerance)

    def of_other_response(i: int) -> Tensor | None:
        size = len(recorded[i])
        others = (x for j, x in enumerate(right) if j != i and size == len(x) > 1)
        each = (errors_of(recorded[i], x, stored) for x in others)
        return next((errors for errors in each if fits(i, errors)), None)

    def of_other_tokens(i: int) -> Tensor | None:
        errors = errors_of(recorded[i].sort().values, right[i].sort().values, stored)
        return errors if len(errors) > 2 and fits(i, errors) else None

    orders: tuple[tuple[Pattern, str, Callable[[int], Tensor | None]], ...] = (
        ("of other responses", "the log-probs of other responses", of_other_response),
        ("of other tokens", "the right numbers in another order within the response", of_other_tokens),
    )
    for pattern, words, order in orders:
        parts = list[Tensor]()
        for i in trial.side.wrong_responses:
            if (errors := order(i)) is None:
                break
            parts.append(errors)
        else:
            yield Hypothesis(
                combination=PLAIN,
                errors=torch.cat(parts),
                explains=True,
                words=words,
                pattern=pattern,
            )
