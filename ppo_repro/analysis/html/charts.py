"""Draw charts as inline SVG: lines with bands, and bars. Colours are classes of style.css.

The charts need no network. They follow light and dark colours and the width of a phone, and show the values under the
pointer. Matplotlib's SVG has style attributes, which the page's security policy forbids.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ppo_repro.analysis.html.axes import Axis, ticks
from ppo_repro.analysis.html.markup import element, escape, evenly_spread, number
from ppo_repro.statistics.clusters import Floats

WIDTH, PLOT_HEIGHT = 400.0, 200.0
LEFT, RIGHT, BOTTOM, TOP = 58.0, 18.0, 46.0, 28.0
LEGEND_ROW = 19.0
CHARACTER = 7.9  # an upper bound of the width of a character at the size of the legend
COLOURS = 8
FEW_POINTS = 30  # a line with at most this many points also shows each point
MAX_X_VALUES = 320  # the plot is about this wide in pixels, so that more values could not be told apart
DIGITS = 6


@dataclass(frozen=True)
class Line:
    """Line over x, with an optional band from `low` to `high`; NaN makes a gap.

    `parts` are thin lines in place of the band. The legend shows `tooltip` under the pointer.
    """

    name: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    colour: int = 0
    parts: tuple[Line, ...] = ()
    tooltip: str = ""


@dataclass(frozen=True)
class Rule:
    """Straight dotted line across the plot, at a value of y or x; the legend shows its name."""

    value: float
    name: str = ""
    along: Literal["x", "y"] = "y"


class Mark(NamedTuple):
    """Entry of the legend: `mark` is the class of style.css that draws it."""

    name: str
    mark: str
    tooltip: str = ""


@dataclass(frozen=True)
class Plot:
    """Plot with its axes below a legend; `top` is the y position of the plot, and `legend` is SVG."""

    x: Axis
    y: Axis
    legend: str = ""
    top: float = TOP

    def across(self, values: Floats | float) -> Floats:
        """Return the x positions of values."""
        return LEFT + self.x.at(values) * (WIDTH - LEFT - RIGHT)

    def down(self, values: Floats | float) -> Floats:
        """Return the y positions of values."""
        return self.top + (1.0 - self.y.at(values)) * PLOT_HEIGHT

    def picture(self, content: Sequence[str], rules: Sequence[Rule], alt: str, hover: dict[str, object]) -> str:
        """Return the SVG element of the plot; `alt` is its text alternative, and charts.js shows `hover`."""
        height = self.top + PLOT_HEIGHT + BOTTOM
        inside = self.legend + _frame(self) + "".join(content) + _rules(self, rules)
        values = json.dumps(hover, ensure_ascii=True, separators=(",", ":"))
        box = f"0 0 {WIDTH:g} {height:g}"
        return element("svg", inside, class_="chart", viewBox=box, role="img", aria_label=alt, data_hover=values)


def legend(names: Sequence[str]) -> str:
    """Return one legend for several charts of the same lines, as HTML; "" for a single line."""
    if len(names) < 2:
        return ""
    entries = []
    for i, name in enumerate(names):
        path = f'<path class="line stroke{i % COLOURS}" d="M0 4h28"></path>'
        line = element("svg", path, viewBox="0 0 28 8", role="img", aria_label="line")
        entries.append(element("li", line + escape(name)))
    return element("ul", "".join(entries), class_="swatches")


def line_chart(
    lines: Sequence[Line], x: Axis, y: Axis, alt: str, rules: Sequence[Rule] = (), has_legend: bool = True
) -> str:
    """Return a chart of lines with their bands, distinguished by colour and dashes."""
    marks = [Mark(line.name, f"fill{line.colour % COLOURS}", line.tooltip) for line in lines]
    named_rules = [Mark(rule.name, "rule") for rule in rules if rule.name]
    plot = _below_legend(x, y, [*(marks if has_legend and len(marks) > 1 else []), *named_rules])
    content = [_band(plot, line) for line in lines]
    for line in lines:
        content += [_stroke("part", line.colour, plot.across(part.x), plot.down(part.y)) for part in line.parts]
    content += [_line(plot, line) for line in lines]
    return plot.picture(content, rules, alt, _values(plot, lines))


def bar_chart(
    edges: Floats, groups: Mapping[str, Floats], x: Axis, y: Axis, alt: str, names: Sequence[str] = ()
) -> str:
    """Return a chart of bars; the bars of several groups stand side by side in each bin.

    Args:
        edges: [bins + 1], edges of the bins on the x axis.
        groups: the heights of the bars of each group, [bins].
        names: the names of the bins; by default their edges.
    """
    marks = [Mark(name, f"fill{i % COLOURS}") for i, name in enumerate(groups)]
    plot = _below_legend(x, y, marks if len(marks) > 1 else [])
    at, bottom = plot.across(edges), plot.top + PLOT_HEIGHT
    width, content = np.diff(at) / len(groups), []
    for i, heights in enumerate(groups.values()):
        start = at[:-1] + i * width
        bars = zip(start + 0.4, start + width - 0.4, plot.down(heights), strict=True)
        d = "".join(f"M{a:.1f} {bottom:.1f}V{t:.1f}H{b:.1f}V{bottom:.1f}Z" for a, b, t in bars if t < bottom)
        content.append(f'<path class="bar fill{i % COLOURS}" d="{d}"></path>')
    labels = []
    for k, name in enumerate(names or _between(x.label, edges)):
        values = [_labelled(group, heights[k]) for group, heights in groups.items()]
        labels.append([round(float(at[k] + at[k + 1]) / 2, 1), "\n".join([name, *values])])
    return plot.picture(content, (), alt, {"at": labels})


def _below_legend(x: Axis, y: Axis, marks: Sequence[Mark]) -> Plot:
    """Return a plot below a legend, in which long names wrap; without marks, a plot without a legend."""
    if not marks:
        return Plot(x, y)
    elements, left, top = [], 0.0, TOP + 4.0
    for name, mark, tooltip in marks:
        rows = textwrap.wrap(name, math.floor((WIDTH - 19) / CHARACTER)) or [""]
        width = 24 + CHARACTER * max(map(len, rows))
        if left > 0 and (left + width > WIDTH or len(rows) > 1):
            left, top = 0.0, top + LEGEND_ROW
        d = f"M{left:.1f} {top - 4:.1f}h14" if mark == "rule" else f"M{left:.1f} {top - 8:.1f}h14v8h-14z"
        entry = [f'<path class="{mark}" d="{d}"></path>', *([element("title", escape(tooltip))] if tooltip else [])]
        for k, row in enumerate(rows):
            entry.append(f'<text x="{left + 19:.1f}" y="{top + k * LEGEND_ROW:.1f}">{escape(row)}</text>')
        elements.append(element("g", "".join(entry)))
        top += (len(rows) - 1) * LEGEND_ROW
        left = left + width + 9 if len(rows) == 1 else WIDTH
    return Plot(x, y, element("g", "".join(elements), class_="legend"), top + 12.0)


def _frame(plot: Plot) -> str:
    """Draw grid lines, tick labels and axis labels; the label of the y axis is above the plot."""
    right, bottom, elements = WIDTH - RIGHT, plot.top + PLOT_HEIGHT, []
    for value, label in ticks(plot.y):
        y = float(plot.down(value))
        elements.append(f'<path class="grid" d="M{LEFT:.1f} {y:.1f}H{right:.1f}"></path>')
        elements.append(f'<text class="end" x="{LEFT - 6:.1f}" y="{y + 4:.1f}">{escape(label)}</text>')
    free = -math.inf  # where the last label ends
    for value, label in ticks(plot.x):
        x, width = float(plot.across(value)), len(label) * CHARACTER
        elements.append(f'<path class="grid" d="M{x:.1f} {plot.top:.1f}V{bottom:.1f}"></path>')
        # at the edge of the picture a centred label would be cut
        anchor, at, start = ("end", WIDTH, WIDTH - width) if x + width / 2 > WIDTH else ("middle", x, x - width / 2)
        if start >= free:  # the pointer shows the value of a label without room
            free = start + width
            elements.append(f'<text class="{anchor}" x="{at:.1f}" y="{bottom + 17:.1f}">{escape(label)}</text>')
    x_label, y_label = (f"{a.label} × 1e{a.power}".strip() if a.power else a.label for a in (plot.x, plot.y))
    middle = (LEFT + right) / 2
    elements.append(f'<text class="middle label" x="{middle:.1f}" y="{bottom + 38:.1f}">{escape(x_label)}</text>')
    elements.append(f'<text class="label" x="0" y="12">{escape(y_label)}</text>')
    return element("g", "".join(elements), class_="axes")


def _rules(plot: Plot, rules: Sequence[Rule]) -> str:
    lines = [
        f"M{LEFT:.1f} {float(plot.down(rule.value)):.1f}H{WIDTH - RIGHT:.1f}" if rule.along == "y"
        else f"M{float(plot.across(rule.value)):.1f} {plot.top:.1f}V{plot.top + PLOT_HEIGHT:.1f}"
        for rule in rules
    ]  # fmt: skip
    return "".join(f'<path class="rule" d="{d}"></path>' for d in lines)


def _stroke(mark: str, colour: int, x: Floats, y: Floats) -> str:
    """Draw a line through positions, without points that stand alone; `mark` is its class."""
    d = "".join(_open(x[run], y[run]) for run in _finite_runs(y) if len(run) > 1)
    return f'<path class="{mark} stroke{colour % COLOURS}" d="{d}"></path>' if d else ""


def _line(plot: Plot, line: Line) -> str:
    x, y = plot.across(line.x), plot.down(np.asarray(line.y, dtype=np.float64))
    alone = [run[0] for run in _finite_runs(y) if len(run) == 1]
    dots = np.flatnonzero(np.isfinite(y)) if len(y) <= FEW_POINTS else alone
    circles = (
        f'<circle class="fill{line.colour % COLOURS}" cx="{x[k]:.1f}" cy="{y[k]:.1f}" r="2.4"></circle>' for k in dots
    )
    return _stroke("line", line.colour, x, y) + "".join(circles)


def _band(plot: Plot, line: Line) -> str:
    if line.low is None or line.high is None or line.parts:
        return ""
    x, low, high = plot.across(line.x), plot.down(line.low), plot.down(line.high)
    d = "".join(
        _open(np.concatenate([x[run], x[run][::-1]]), np.concatenate([low[run], high[run][::-1]])) + "Z"
        for run in _finite_runs(low + high)
        if len(run) > 1
    )
    return f'<path class="band fill{line.colour % COLOURS}" d="{d}"></path>' if d else ""


def _finite_runs(y: Floats) -> list[npt.NDArray[np.int64]]:
    """Return the longest runs of consecutive indices at which y is finite."""
    finite = np.flatnonzero(np.isfinite(y))
    return [run for run in np.split(finite, np.flatnonzero(np.diff(finite) > 1) + 1) if len(run)]


def _open(x: Floats, y: Floats) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _values(plot: Plot, lines: Sequence[Line]) -> dict[str, object]:
    """Return the values of every line at up to MAX_X_VALUES values of x, which the page shows under the pointer."""
    x_values = np.unique(np.concatenate([line.x for line in lines])) if lines else np.zeros(0)
    rows = [{float(x): k for k, x in enumerate(line.x)} for line in lines]
    labels = []
    for x in x_values[evenly_spread(len(x_values), MAX_X_VALUES)].tolist():
        words = [f"{plot.x.label} {number(x, DIGITS)}"]
        for line, row in zip(lines, rows, strict=True):
            if x in row:
                k, band = row[x], ""
                if line.low is not None and line.high is not None and math.isfinite(line.low[k] + line.high[k]):
                    band = f" ({number(float(line.low[k]))} to {number(float(line.high[k]))})"
                words.append(_labelled(line.name, line.y[k]) + band)
        labels.append([round(float(plot.across(x)), 1), "\n".join(words)])
    return {"at": labels}


def _labelled(name: str, value: float) -> str:
    return f"{name}: {number(float(value), DIGITS)}"


def _between(label: str, edges: Floats) -> list[str]:
    """Return the name of each bin from its edges, for example `ratio 0.9 to 1.1`."""
    ends = [number(float(edge)) for edge in edges]
    return [f"{label} {lo} to {hi}" for lo, hi in pairwise(ends)]
