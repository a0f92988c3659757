"""Which layouts change a loss, and how far a loss is from another one; see `losses` for what a layout is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ppo_repro.errors import UserError
from ppo_repro.testing.losses import (
    LAYOUTS,
    TOLERANCE,
    Combine,
    Loss,
    LossLayout,
    LossResult,
    LossRollout,
    evaluate_loss,
    rollout_of,
)

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Drift:
    """How far one result is from another. Drifts are relative: of the value, and of the largest gradient."""

    what: str  # the layout, or the other loss
    value: float
    expected: float
    value_drift: float
    gradient_drift: float
    tokens: int  # whose gradient drifts by more than the tolerance
    first: tuple[int, int] | None  # sequence and position of the first of them
    padding_gradients: int
    tolerance: float

    @property
    def is_small(self) -> bool:
        """Whether value and gradient are equal within the tolerance, and padding has no gradient."""
        within = self.value_drift <= self.tolerance and self.gradient_drift <= self.tolerance
        return within and not self.padding_gradients

    def describe(self) -> str:
        """One line."""
        if self.is_small:
            return f"{self.what}: the same"
        parts = []
        if not self.value_drift <= self.tolerance:
            parts.append(f"value {self.value:.9g} instead of {self.expected:.9g}")
        if self.first is not None:
            where = f"sequence {self.first[0]}, position {self.first[1]}"
            parts.append(f"gradient differs at {self.tokens} tokens, by {self.gradient_drift:.2g}, first at {where}")
        if self.padding_gradients:
            parts.append(f"{self.padding_gradients} positions of padding have a gradient")
        return f"{self.what}: {'; '.join(parts)}"


@dataclass(frozen=True)
class Conformance:
    """A loss under every layout, beside the whole step at once, padded on the right."""

    expected: LossResult
    drifts: tuple[Drift, ...]

    @property
    def conforms(self) -> bool:
        """Whether no layout changes anything."""
        return all(drift.is_small for drift in self.drifts)

    def lines(self) -> list[str]:
        """One line for each layout."""
        return [drift.describe() for drift in self.drifts]

    def frame(self) -> pd.DataFrame:
        """One row for each layout."""
        import pandas as pd

        return pd.DataFrame([vars(drift) for drift in self.drifts])


def _rollout(rollout: LossRollout | pd.DataFrame) -> LossRollout:
    return rollout if isinstance(rollout, LossRollout) else rollout_of(rollout)


def _drift(what: str, found: LossResult, expected: LossResult, rollout: LossRollout, tolerance: float) -> Drift:
    a, b = np.array(found.gradients), np.array(expected.gradients)
    if a.shape != b.shape:
        raise UserError(f"{what}: the baseline has {b.size} tokens, the rollout {a.size}; compare the same rollout")
    largest, mass = float(np.abs(b).max(initial=0.0)), float(np.abs(b).sum())
    # a value near 0 is a sum that cancels: the gradients say how large its terms are
    scale = max(abs(expected.value), mass) or 1.0
    differences = np.abs(a - b) / (largest or 1.0)
    wrong = np.flatnonzero(~(differences <= tolerance))  # NaN is wrong
    first = None
    if wrong.size:
        ends = list(accumulate(rollout.lengths))
        sequence = next(i for i, end in enumerate(ends) if wrong[0] < end)
        first = sequence, int(wrong[0]) - (ends[sequence] - rollout.lengths[sequence])
    value_drift = abs(found.value - expected.value) / scale
    return Drift(
        what=what,
        value=found.value,
        expected=expected.value,
        value_drift=math.inf if math.isnan(value_drift) else value_drift,
        gradient_drift=float(np.nan_to_num(differences, nan=math.inf).max(initial=0.0)),
        tokens=int(wrong.size),
        first=first,
        padding_gradients=found.padding_gradients,
        tolerance=tolerance,
    )


def check_loss(
    loss: Loss,
    rollout: LossRollout | pd.DataFrame,
    *,
    combine: Combine,
    layouts: Sequence[LossLayout] = LAYOUTS,
    tolerance: float = TOLERANCE,
) -> Conformance:
    """Value and gradient of `loss` under every layout, beside those of the whole step at once.

    Args:
        loss: a function of `LossBatch` that returns a scalar; nats and units are its own.
        rollout: a `LossRollout`, or a data frame with one row per token, see `rollout_of`.
        combine: `mean` or `sum` of the losses of micro-batches and ranks, as the trainer does it.
        tolerance: relative, of the value and of the largest gradient.

    Raises UserError for a rollout or a loss that cannot be used.

    >>> from ppo_repro.testing.conformance import check_loss
    >>> from ppo_repro.testing.example_losses import EXAMPLE, micro_batch_token_mean, step_token_mean
    >>> check_loss(step_token_mean, EXAMPLE, combine="sum").conforms
    True
    >>> print(check_loss(micro_batch_token_mean, EXAMPLE, combine="mean").lines()[0])
    micro_batch 1: value 0.0133471551 instead of 0.125546747; gradient differs at 8 tokens, by 1.2, first at \
sequence 0, position 0
    """
    checked = _rollout(rollout)
    expected = evaluate_loss(loss, checked, LossLayout(), combine)
    results = ((layout, evaluate_loss(loss, checked, layout, combine)) for layout in layouts)
    drifts = (_drift(layout.describe(), result, expected, checked, tolerance) for layout, result in results)
    plain = _drift(LossLayout().describe(), expected, expected, checked, tolerance)  # its padding counts too
    return Conformance(expected, (*drifts, plain) if not plain.is_small else tuple(drifts))


def assert_loss_conforms(
    loss: Loss,
    rollout: LossRollout | pd.DataFrame,
    *,
    combine: Combine,
    layouts: Sequence[LossLayout] = LAYOUTS,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that no layout changes value or gradient of a loss; arguments as of `check_loss`.

    AssertionError has one line for each layout that does, with the first token; UserError as `check_loss`.
    """
    __tracebackhide__ = True
    found = check_loss(loss, rollout, combine=combine, layouts=layouts, tolerance=tolerance)
    if not found.conforms:
        lines = [drift.describe() for drift in found.drifts if not drift.is_small]
        raise AssertionError("the loss depends on the layout of the batch:\n" + "\n".join(lines))


def loss_drift(
    loss: Loss,
    baseline: Loss | LossResult | Path | str,
    rollout: LossRollout | pd.DataFrame,
    *,
    combine: Combine = "sum",
    tolerance: float = TOLERANCE,
) -> Drift:
    """How far `loss` is from another implementation, or from a result saved before, on the whole step at once.

    Drifts are |a - b| / max(|b|, sum of |gradients|) of the value and |a - b| / max |b| of the gradients [N]. UserError
    where the baseline is of other tokens, or a file is no saved result.

    >>> from ppo_repro.testing.conformance import loss_drift
    >>> from ppo_repro.testing.example_losses import EXAMPLE, kl_cov, step_token_mean
    >>> loss_drift(kl_cov, step_token_mean, EXAMPLE).first
    (1, 0)
    """
    checked = _rollout(rollout)
    if callable(baseline):
        what = getattr(baseline, "__name__", "baseline")
        expected = evaluate_loss(baseline, checked, LossLayout(), combine)
    else:
        what = "baseline" if isinstance(baseline, LossResult) else str(baseline)
        expected = baseline if isinstance(baseline, LossResult) else LossResult.load(baseline)
    return _drift(what, evaluate_loss(loss, checked, LossLayout(), combine), expected, checked, tolerance)


def assert_loss_drift_below(
    loss: Loss,
    baseline: Loss | LossResult | Path | str,
    rollout: LossRollout | pd.DataFrame,
    *,
    limit: float,
    combine: Combine = "sum",
) -> None:
    """Assert that value and gradient are within `limit` of a baseline, relative; see `loss_drift`.

    AssertionError says how far they are and names the first token; UserError as `loss_drift`.
    """
    __tracebackhide__ = True
    drift = loss_drift(loss, baseline, rollout, combine=combine, tolerance=limit)
    if not drift.is_small:
        raise AssertionError(drift.describe())
