"""Which layouts and dtypes change a loss, where it is not finite, and how far it is from another one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ppo_repro.errors import UserError
from ppo_repro.testing.losses import (
    LAYOUTS,
    LOG_RATIOS,
    Combine,
    Loss,
    LossLayout,
    LossResult,
    LossRollout,
    evaluate_loss,
    extremes,
    rollout_of,
)

if TYPE_CHECKING:
    import pandas as pd

# relative; float64 sums of a million terms stay below 1e-10, changes of meaning are far above
TOLERANCE = 1e-9
# of a log-ratio of 800 float32 keeps 1e-4; a right loss in float32 stays below
TOLERANCES = {torch.float64: TOLERANCE, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


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
    not_finite: tuple[tuple[int, int], ...]  # tokens whose gradient is not finite
    factor: float | None  # by which every gradient differs, if it is one
    padding_gradients: int
    tolerance: float

    @property
    def is_small(self) -> bool:
        """Whether value and gradient are equal within the tolerance, and nothing under the mask has a gradient."""
        within = self.value_drift <= self.tolerance and self.gradient_drift <= self.tolerance
        return within and not self.padding_gradients and not self.not_finite

    def describe(self) -> str:
        """One line."""
        if self.is_small:
            return f"{self.what}: the same"
        parts = []
        if self.not_finite:
            where = ", ".join(f"sequence {s}, position {p}" for s, p in self.not_finite[:3])
            parts.append(
                f"not finite at {where}" + f" and {len(self.not_finite) - 3} more" * (len(self.not_finite) > 3)
            )
        elif not math.isfinite(self.value):
            parts.append(f"the value is {self.value:g}")
        elif self.factor is not None:
            parts.append(f"differs by the factor {self.factor:.6g} everywhere" if self.factor else "is 0 everywhere")
        else:
            if not self.value_drift <= self.tolerance:
                parts.append(f"value {self.value:.9g} instead of {self.expected:.9g}")
            if self.first is not None:
                where = f"sequence {self.first[0]}, position {self.first[1]}"
                parts.append(
                    f"gradient differs at {self.tokens} tokens, by {self.gradient_drift:.2g}, first at {where}"
                )
        if self.padding_gradients:
            parts.append(f"{self.padding_gradients} positions under the mask have a gradient")
        return f"{self.what}: {'; '.join(parts)}"


@dataclass(frozen=True)
class Conformance:
    """A loss under every layout, dtype and extreme, beside the whole step at once in float64."""

    expected: LossResult
    drifts: tuple[Drift, ...]

    @property
    def conforms(self) -> bool:
        """Whether nothing changes the loss, and it is finite everywhere."""
        return all(drift.is_small for drift in self.drifts)

    def lines(self) -> list[str]:
        """One line for each layout, dtype and extreme."""
        return [drift.describe() for drift in self.drifts]


def _rollout(rollout: LossRollout | pd.DataFrame) -> LossRollout:
    return rollout if isinstance(rollout, LossRollout) else rollout_of(rollout)


def _drift(what: str, found: LossResult, expected: LossResult, rollout: LossRollout, tolerance: float) -> Drift:
    a, b = np.array(found.gradients), np.array(expected.gradients)
    if a.shape != b.shape:
        raise UserError(f"{what}: the baseline has {b.size} tokens, the rollout {a.size}; compare the same rollout")
    largest, mass = float(np.abs(b).max(initial=0.0)), float(np.abs(b).sum())
    # a value near 0 is a sum that cancels: the gradients say how large its terms are
    scale = max(abs(expected.value), mass) or 1.0
    with np.errstate(invalid="ignore"):
        differences = np.abs(a - b) / (largest or 1.0)
    wrong = np.flatnonzero(~(differences <= tolerance))  # NaN is wrong
    value_drift = abs(found.value - expected.value) / scale
    factor = None
    if wrong.size and b @ b > 0 and np.isfinite(a).all():
        ratio = float(a @ b / (b @ b))
        same = float(np.abs(a - ratio * b).max()) <= tolerance * largest * max(1.0, abs(ratio))
        factor = ratio if same and abs(found.value - ratio * expected.value) <= tolerance * scale else None
    return Drift(
        what=what,
        value=found.value,
        expected=expected.value,
        value_drift=value_drift if math.isfinite(value_drift) else math.inf,
        gradient_drift=float(np.nan_to_num(differences, nan=math.inf).max(initial=0.0)),
        tokens=int(wrong.size),
        first=rollout.place(int(wrong[0])) if wrong.size else None,
        not_finite=tuple(rollout.place(int(i)) for i in np.flatnonzero(~np.isfinite(a))),
        factor=factor,
        padding_gradients=found.padding_gradients,
        tolerance=tolerance,
    )


def check_loss(
    loss: Loss,
    rollout: LossRollout | pd.DataFrame,
    *,
    combine: Combine,
    layouts: Sequence[LossLayout] = LAYOUTS,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    log_ratios: Sequence[float] = LOG_RATIOS,
    tolerance: float = TOLERANCE,
) -> Conformance:
    """Value and gradient of `loss` under every layout and dtype, and at extreme tokens.

    Args:
        loss: a function of `LossBatch` that returns a scalar; nats and units are its own.
        rollout: a `LossRollout`, or a data frame with one row per token, see `rollout_of`.
        combine: `mean` or `sum` of the losses of micro-batches and ranks, as the trainer does it.
        dtypes: beside float64; each is compared with float64 of the same numbers.
        log_ratios: of the extreme tokens, see `losses.extremes`; () leaves them out.
        tolerance: relative, of the value and of the largest gradient, in float64.

    A loss that is not finite on the rollout itself has that one verdict, and no layout is blamed. Raises UserError for
    a rollout or a loss that cannot be used.

    >>> from ppo_repro.testing.conformance import check_loss
    >>> from ppo_repro.testing.example_losses import EXAMPLE, micro_batch_token_mean, step_token_mean
    >>> check_loss(step_token_mean, EXAMPLE, combine="sum").conforms
    True
    >>> print(check_loss(micro_batch_token_mean, EXAMPLE, combine="mean").lines()[0])
    micro batch 1: value 0.0133471551 instead of 0.125546747; gradient differs at 8 tokens, by 1.2, first at \
sequence 0, position 0
    """
    checked, whole = _rollout(rollout), LossLayout()
    expected = evaluate_loss(loss, checked, whole, combine)
    plain = _drift(whole.describe(), expected, expected, checked, tolerance)
    if plain.not_finite or not math.isfinite(expected.value):
        return Conformance(expected, (plain,))
    found = []
    for layout in layouts:
        result = evaluate_loss(loss, checked, layout, combine)
        found.append(_drift(layout.describe(), result, expected, checked, tolerance))
    cases = [("", checked), *((what, case) for what, _, case in extremes(checked, log_ratios))]
    failed: set[str] = set()  # in float64: not said again of narrower numbers
    for dtype in (torch.float64, *dtypes):
        name = str(dtype).removeprefix("torch.")
        for what, case in [c for c in cases if c[0] not in failed]:
            rounded = _rounded(case, dtype)  # so that only what the loss computes is compared
            wide = evaluate_loss(loss, rounded, whole, combine)
            result = evaluate_loss(loss, rounded, replace(whole, dtype=dtype), combine)
            drift = _drift(", ".join(filter(None, [name, what])), result, wide, rounded, TOLERANCES.get(dtype, 0.1))
            if dtype == torch.float64 and drift.is_small:
                continue
            found.append(drift)
            failed |= set() if drift.is_small else {what}
    return Conformance(expected, (*found, plain) if not plain.is_small else tuple(found))


def _rounded(rollout: LossRollout, dtype: torch.dtype) -> LossRollout:
    columns = {name: x.to(dtype).double() for name, x in rollout.columns.items()}
    return replace(rollout, new_logprobs=rollout.new_logprobs.to(dtype).double(), columns=columns)


def assert_loss_conforms(
    loss: Loss,
    rollout: LossRollout | pd.DataFrame,
    *,
    combine: Combine,
    layouts: Sequence[LossLayout] = LAYOUTS,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    log_ratios: Sequence[float] = LOG_RATIOS,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that no layout or dtype changes a loss, and that it is finite; arguments as of `check_loss`.

    AssertionError has one line for each that does, with the first token; UserError as `check_loss`.
    """
    __tracebackhide__ = True
    options = {"layouts": layouts, "dtypes": dtypes, "log_ratios": log_ratios}
    found = check_loss(loss, rollout, combine=combine, tolerance=tolerance, **options)  # type: ignore[arg-type]
    if not found.conforms:
        lines = [drift.describe() for drift in found.drifts if not drift.is_small]
        raise AssertionError("the loss does not follow from the tokens that count:\n" + "\n".join(lines))


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
