"""Axes of a chart: ranges, ticks, positions on the page, the frame around the plot, the legend above it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analysis.report.drawing.markup import element, escape

Floats = npt.NDArray[np.float64]

WIDTH, PLOT_HEIGHT = 400.0, 200.0
LEFT, RIGHT, BOTTOM, TOP = 58.0, 18.0, 46.0, 28.0
LEGEND_ROW = 19.0
# an upper bound of the width of a character at the size of the legend
CHARACTER = 7.9
# magnitudes that labels of ticks show as they are; others are divided by a power of 1000
PLAIN = (1e-2, 1e5)


@dataclass(frozen=True)
class Axis:
    """One axis: label with unit, range in the units of the data, linear or log10; `ticks` replaces the usual ones.

    `whole`: of numbers without fractions, such as iterations; its ticks have none either.
    """

    label: str
    lo: float
    hi: float
    log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    whole: bool = False

    def at(self, values: Floats | float) -> Floats:
        """Where values lie between the ends, 0 at `lo` and 1 at `hi`, clipped to the ends; NaN stays NaN."""
        data = np.asarray(values, dtype=np.float64)
        lo, hi = self.lo, self.hi
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                data = np.where(data > 0, np.log10(data), np.where(np.isnan(data), np.nan, -np.inf))
            lo, hi = math.log10(lo), math.log10(hi)
        return np.clip((data - lo) / (hi - lo), 0.0, 1.0)


@dataclass(frozen=True)
class Plot:
    """The position of the plot inside the picture, in its units."""

    x: Axis
    y: Axis
    top: float

    @property
    def height(self) -> float:
        """Height of the whole picture."""
        return self.top + PLOT_HEIGHT + BOTTOM

    def across(self, values: Floats | float) -> Floats:
        """x positions of values."""
        return LEFT + self.x.at(values) * (WIDTH - LEFT - RIGHT)

    def down(self, values: Floats | float) -> Floats:
        """y positions of values."""
        return self.top + (1.0 - self.y.at(values)) * PLOT_HEIGHT


def axis_for(label: str, values: Iterable[object], log: bool = False, include: Sequence[float] = ()) -> Axis:
    """An axis over every finite value (positive, if log) and the values to `include`, with a little room."""
    data = np.concatenate([np.asarray(values_of, dtype=np.float64).ravel() for values_of in (*values, list(include))])
    usable = data[np.isfinite(data) & ((data > 0) | (not log))]
    lo, hi = (float(usable.min()), float(usable.max())) if len(usable) else (1.0, 10.0)
    if log:
        lo, hi = 10.0 ** math.floor(math.log10(lo)), 10.0 ** math.ceil(math.log10(hi))
        return Axis(label, lo, hi if hi > lo else lo * 10.0, True)
    if hi == lo:
        room = abs(lo) * 0.1 or 1.0
    else:
        room = (hi - lo) * 0.04
    # an axis of a quantity that is never negative begins at 0, not below
    whole = bool(len(usable)) and bool((usable == np.round(usable)).all())
    return Axis(label, max(lo - room, 0.0) if lo >= 0 else lo - room, hi + room, whole=whole)


def ticks(axis: Axis) -> list[tuple[float, str]]:
    """About five round values within an axis, with their labels, in units of `power_of`."""
    if axis.ticks:
        return list(axis.ticks)
    if axis.log:
        lo, hi = round(math.log10(axis.lo)), round(math.log10(axis.hi))
        every = max(1, math.ceil((hi - lo) / 6))
        return [(10.0**power, _power(power)) for power in range(lo, hi + 1, every)]
    raw = (axis.hi - axis.lo) / 5
    magnitude = 10.0 ** math.floor(math.log10(raw))
    rounded = (1.0, 2.0, 5.0, 10.0) if axis.whole else (1.0, 2.0, 2.5, 5.0, 10.0)
    step = next(m * magnitude for m in rounded if m * magnitude >= raw * 0.999)
    step = max(step, 1.0) if axis.whole else step
    first = math.ceil(axis.lo / step - 1e-9)
    count = math.floor(axis.hi / step + 1e-9) - first
    scale = 10.0 ** power_of(axis)
    return [((first + k) * step, f"{(first + k) * step / scale:.6g}") for k in range(count + 1)]


def power_of(axis: Axis) -> int:
    """The power of ten, a multiple of 3, that the labels of an axis are divided by, so that they stay short."""
    largest = max(abs(axis.lo), abs(axis.hi))
    if axis.ticks or axis.log or PLAIN[0] <= largest < PLAIN[1]:
        return 0
    return 3 * math.floor(math.log10(largest) / 3)


def label_of(axis: Axis) -> str:
    """The label, with the power of ten where the ticks are divided by one."""
    power = power_of(axis)
    return axis.label if power == 0 else f"{axis.label} × 1e{power}".strip()


def _power(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 4 else f"1e{power}"


def legend(names: Sequence[str], marks: Sequence[str]) -> tuple[str, float]:
    """The rows above the plot, one mark (CSS class of a colour) per name, and the height they take; long names wrap."""
    if len(names) < 2:
        return "", TOP
    elements, x, y = [], 0.0, TOP + 4.0
    for name, mark in zip(names, marks, strict=True):
        rows = textwrap.wrap(name, math.floor((WIDTH - 19) / CHARACTER)) or [""]
        width = 24 + CHARACTER * max(map(len, rows))
        if x > 0 and (x + width > WIDTH or len(rows) > 1):
            x, y = 0.0, y + LEGEND_ROW
        elements.append(f'<rect class="{mark}" x="{x:.1f}" y="{y - 8:.1f}" width="14" height="8"></rect>')
        for row in rows:
            elements.append(f'<text x="{x + 19:.1f}" y="{y:.1f}">{escape(row)}</text>')
            y += LEGEND_ROW
        y -= LEGEND_ROW
        x = x + width + 9 if len(rows) == 1 else WIDTH
    return element("g", "".join(elements), class_="legend"), y + 12.0


def frame(plot: Plot) -> str:
    """Grid lines, tick labels and axis labels; the label of the y axis is above the plot, where it has room."""
    elements = []
    right, bottom = WIDTH - RIGHT, plot.top + PLOT_HEIGHT
    for value, label in ticks(plot.y):
        y = float(plot.down(value))
        elements.append(f'<path class="grid" d="M{LEFT:.1f} {y:.1f}H{right:.1f}"></path>')
        elements.append(f'<text class="end" x="{LEFT - 6:.1f}" y="{y + 4:.1f}">{escape(label)}</text>')
    for value, label in ticks(plot.x):
        x = float(plot.across(value))
        elements.append(f'<path class="grid" d="M{x:.1f} {plot.top:.1f}V{bottom:.1f}"></path>')
        # at the edge of the picture a centred label would be cut
        place, at = ("end", WIDTH) if x + len(label) * CHARACTER / 2 > WIDTH else ("middle", x)
        elements.append(f'<text class="{place}" x="{at:.1f}" y="{bottom + 17:.1f}">{escape(label)}</text>')
    middle = (LEFT + right) / 2
    name = escape(label_of(plot.x))
    elements.append(f'<text class="middle label" x="{middle:.1f}" y="{bottom + 38:.1f}">{name}</text>')
    elements.append(f'<text class="label" x="0" y="12">{escape(label_of(plot.y))}</text>')
    return element("g", "".join(elements), class_="axes")


def picture(plot: Plot, content: str, about: str, hover: str = "") -> str:
    """The whole SVG element with its text alternative; `hover` is what `drawing.hover` makes."""
    box, values = f"0 0 {WIDTH:g} {plot.height:g}", f' data-hover="{hover}"' if hover else ""
    return f'<svg class="chart" viewBox="{box}" role="img" aria-label="{escape(about)}"{values}>{content}</svg>'
