"""Choose the range and the ticks of a chart's axis, and scale values to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ppo_repro.statistics.clusters import Floats

PLAIN = (1e-2, 1e5)  # magnitudes that ticks show as they are; others are divided by a power of 1000


class Tick(NamedTuple):
    """A labelled value of an axis."""

    value: float
    label: str


@dataclass(frozen=True)
class Axis:
    """Axis of a chart: label with unit, range in the units of the data, linear or log10.

    `ticks` replace the usual ticks. `whole` means that data and ticks are integers, for example iterations.
    """

    label: str
    lo: float
    hi: float
    log: bool = False
    ticks: tuple[Tick, ...] = ()
    whole: bool = False

    def at(self, values: Floats | float) -> Floats:
        """Scale values to 0 at `lo` and 1 at `hi`, clipped to [0, 1]; NaN stays NaN."""
        data, lo, hi = np.asarray(values, dtype=np.float64), self.lo, self.hi
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                data = np.where(data > 0, np.log10(data), np.where(np.isnan(data), np.nan, -np.inf))
            lo, hi = math.log10(lo), math.log10(hi)
        return np.clip((data - lo) / (hi - lo), 0.0, 1.0)

    @property
    def power(self) -> int:
        """Return the power of ten, a multiple of 3, that divides the labels of ticks to keep them short."""
        largest = max(abs(self.lo), abs(self.hi))
        if self.ticks or self.log or PLAIN[0] <= largest < PLAIN[1]:
            return 0
        return 3 * math.floor(math.log10(largest) / 3)


def axis_for(label: str, values: Iterable[object], log: bool = False, include: Sequence[float] = ()) -> Axis:
    """Return an axis over all finite values, with a margin.

    Args:
        label: the name of the values, with the unit.
        log: whether the axis is logarithmic; it then shows positive values only.
        include: further values that the axis must show.
    """
    data = np.concatenate([np.asarray(values_of, dtype=np.float64).ravel() for values_of in (*values, list(include))])
    usable = data[np.isfinite(data) & ((data > 0) | (not log))]
    lo, hi = (float(usable.min()), float(usable.max())) if len(usable) else (1.0, 10.0)
    if log:
        lo, hi = 10.0 ** math.floor(math.log10(lo)), 10.0 ** math.ceil(math.log10(hi))
        return Axis(label, lo, hi if hi > lo else lo * 10.0, True)
    room = (hi - lo) * 0.04 if hi > lo else abs(lo) * 0.1 or 1.0
    whole = bool(len(usable)) and bool((usable == np.round(usable)).all())
    # an axis of a quantity that is never negative begins at 0, not below
    return Axis(label, max(lo - room, 0.0) if lo >= 0 else lo - room, hi + room, whole=whole)


def ticks(axis: Axis) -> list[Tick]:
    """Return about five round values within an axis, with their labels, in units of its `power`."""
    if axis.ticks:
        return list(axis.ticks)
    if axis.log:
        lo, hi = round(math.log10(axis.lo)), round(math.log10(axis.hi))
        stride = max(1, math.ceil((hi - lo) / 6))
        powers = range(lo, hi + 1, stride)
        return [Tick(10.0**power, f"{10.0**power:g}" if -3 <= power <= 4 else f"1e{power}") for power in powers]
    raw = (axis.hi - axis.lo) / 5
    magnitude = 10.0 ** math.floor(math.log10(raw))
    rounded = (1.0, 2.0, 5.0, 10.0) if axis.whole else (1.0, 2.0, 2.5, 5.0, 10.0)
    step = next(m * magnitude for m in rounded if m * magnitude >= raw * 0.999)
    step = max(step, 1.0) if axis.whole else step
    first, last = math.ceil(axis.lo / step - 1e-9), math.floor(axis.hi / step + 1e-9)
    return [Tick(k * step, f"{k * step / 10.0**axis.power:.6g}") for k in range(first, last + 1)]
