"""Charts as inline SVG: lines with bands, stacked areas, bars, heat maps. Colours are classes of style.css."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analysis.report.drawing import hover
from analysis.report.drawing.axes import (
    LEFT,
    PLOT_HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Floats,
    Plot,
    frame,
    legend,
    picture,
)
from analysis.report.drawing.markup import element, escape

COLOURS = 8
HEAT_LEVELS = 9
# a line with at most this many points also shows each point
FEW_POINTS = 30


@dataclass(frozen=True)
class Line:
    """A line over x, with an optional band from `low` to `high`; NaN makes a gap."""

    name: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None


@dataclass(frozen=True)
class Rule:
    """A straight line across the plot at a value of y, or of x, with a label; that of y is above or below the line."""

    value: float
    label: str
    along: str = "y"
    below: bool = False


def line_chart(
    lines: Sequence[Line], x: Axis, y: Axis, about: str, rules: Sequence[Rule] = (), with_values: bool = True
) -> str:
    """Lines with their bands, distinguished by colour and dashes; `with_values` of the points, for the pointer."""
    names = [line.name for line in lines]
    above, top = legend(names, [f"fill{i % COLOURS}" for i in range(len(lines))])
    plot = Plot(x, y, top)
    bands = [_band(plot, line, i) for i, line in enumerate(lines)]
    curves = [_line(plot, line, i) for i, line in enumerate(lines)]
    series = [hover.Series(line.name, line.x, line.y, line.low, line.high) for line in lines]
    values = hover.along(x, series, _places(plot, [line.x for line in lines])) if with_values else ""
    return picture(plot, above + frame(plot) + "".join(bands) + _rules(plot, rules) + "".join(curves), about, values)


def area_chart(at: Floats, layers: Sequence[tuple[str, Floats]], x: Axis, y: Axis, about: str) -> str:
    """Layers stacked from the bottom, in their order."""
    above, top = legend([name for name, _ in layers], [f"fill{i % COLOURS}" for i in range(len(layers))])
    plot = Plot(x, y, top)
    base = np.zeros(len(at))
    paths = []
    for i, (_, height) in enumerate(layers):
        d = _closed(plot.across(at), plot.down(base), plot.down(base + height))
        paths.append(f'<path class="area fill{i % COLOURS}" d="{d}"></path>')
        base = base + height
    series = [hover.Series(name, at, height) for name, height in layers]
    values = hover.along(x, series, _places(plot, [at]))
    return picture(plot, above + frame(plot) + "".join(paths), about, values)


def bar_chart(
    lo: Floats, hi: Floats, groups: Sequence[tuple[str, Floats]], x: Axis, y: Axis, about: str,
    rules: Sequence[Rule] = (), names: Sequence[str] = (),
) -> str:  # fmt: skip
    """Bars from the bottom of the plot, from `lo` to `hi`; several groups share that width side by side.

    `names` are those of the bins where their edges do not say what they hold.
    """
    above, top = legend([name for name, _ in groups], [f"fill{i % COLOURS}" for i in range(len(groups))])
    plot = Plot(x, y, top)
    left, right, bottom = plot.across(lo), plot.across(hi), top + PLOT_HEIGHT
    width = (right - left) / len(groups)
    paths = []
    for i, (_, heights) in enumerate(groups):
        tops, start = plot.down(heights), left + i * width
        cells = [
            f"M{a:.1f} {bottom:.1f}V{t:.1f}H{b:.1f}V{bottom:.1f}Z"
            for a, b, t in zip(start + 0.4, start + width - 0.4, tops, strict=True)
            if t < bottom
        ]
        paths.append(f'<path class="bar fill{i % COLOURS}" d="{"".join(cells)}"></path>')
    said = names or hover.between(x.label, np.append(lo, hi[-1:]))
    values = hover.bins(said, (left + right) / 2, groups)
    return picture(plot, above + frame(plot) + "".join(paths) + _rules(plot, rules), about, values)


def heat_map(
    x_edges: Floats, y_edges: Floats, counts: npt.NDArray[np.number], x: Axis, y: Axis, about: str,
    rules: Sequence[Rule] = (), under: Sequence[tuple[float, float, float, float]] = (), diagonal: bool = False,
    what: str = "tokens", x_names: Sequence[str] = (), y_names: Sequence[str] = (),
) -> str:  # fmt: skip
    """Counts of `what`, [x bins, y bins], as shades on a log scale; `under` are shaded boxes (x lo, x hi, y lo, y hi).

    `x_names` and `y_names` are those of the bins where their edges do not say what they hold.
    """
    plot = Plot(x, y, TOP)
    level = heat_levels(counts)
    left, right = plot.across(x_edges[:-1]), plot.across(x_edges[1:])
    low, high = plot.down(y_edges[:-1]), plot.down(y_edges[1:])
    paths = [_box(plot, *box) for box in under]
    for shade in range(1, HEAT_LEVELS + 1):
        bins = np.argwhere(level == shade)
        cells = [f"M{left[i]:.1f} {low[j]:.1f}V{high[j]:.1f}H{right[i]:.1f}V{low[j]:.1f}Z" for i, j in bins.tolist()]
        if cells:
            paths.append(f'<path class="heat{shade}" d="{"".join(cells)}"></path>')
    if diagonal:
        ends = np.array([max(x.lo, y.lo), min(x.hi, y.hi)])
        paths.append(f'<path class="rule" d="{_open(plot.across(ends), plot.down(ends))}"></path>')
    names = x_names or hover.between(x.label, x_edges), y_names or hover.between(y.label, y_edges)
    values = hover.cells(*names, plot.across(x_edges), plot.down(y_edges), counts, what)
    return picture(plot, frame(plot) + "".join(paths) + _rules(plot, rules), about, values)


def heat_levels(counts: npt.NDArray[np.number]) -> npt.NDArray[np.int64]:
    """0 for a count of 0, else 1 to 9 by the logarithm of the count, 9 for the largest."""
    values = np.asarray(counts, dtype=np.float64)
    filled = values > 0
    if not filled.any():
        return np.zeros(values.shape, dtype=np.int64)
    least, most = float(values[filled].min()), float(values.max())
    if most == least:
        return np.where(filled, HEAT_LEVELS, 0)
    fraction = np.log(np.where(filled, values, least) / least) / np.log(most / least)
    return np.where(filled, 1 + np.minimum((fraction * HEAT_LEVELS).astype(np.int64), HEAT_LEVELS - 1), 0)


def _line(plot: Plot, line: Line, index: int) -> str:
    x, y = plot.across(line.x), plot.down(np.asarray(line.y, dtype=np.float64))
    pieces = [_open(x[piece], y[piece]) for piece in _pieces(y) if len(piece) > 1]
    alone = [piece[0] for piece in _pieces(y) if len(piece) == 1]
    dots = [k for k in range(len(y)) if np.isfinite(y[k])] if len(y) <= FEW_POINTS else alone
    path = f'<path class="line stroke{index % COLOURS}" d="{"".join(pieces)}"></path>' if pieces else ""
    circles = [f'<circle class="fill{index % COLOURS}" cx="{x[k]:.1f}" cy="{y[k]:.1f}" r="2.4"></circle>' for k in dots]
    return path + "".join(circles)


def _band(plot: Plot, line: Line, index: int) -> str:
    if line.low is None or line.high is None:
        return ""
    x, low, high = plot.across(line.x), plot.down(line.low), plot.down(line.high)
    pieces = [_closed(x[piece], low[piece], high[piece]) for piece in _pieces(low + high) if len(piece) > 1]
    return f'<path class="band fill{index % COLOURS}" d="{"".join(pieces)}"></path>' if pieces else ""


def _places(plot: Plot, of_lines: Sequence[Floats]) -> dict[float, float]:
    """The position in the picture of every x."""
    every = np.unique(np.concatenate(of_lines)) if of_lines else np.zeros(0)
    return dict(zip(every.tolist(), plot.across(every).tolist(), strict=True))


def _pieces(y: Floats) -> list[npt.NDArray[np.int64]]:
    """Runs of consecutive indices where y is finite."""
    finite = np.flatnonzero(np.isfinite(y))
    return [piece for piece in np.split(finite, np.flatnonzero(np.diff(finite) > 1) + 1) if len(piece)]


def _open(x: Floats, y: Floats) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _closed(x: Floats, low: Floats, high: Floats) -> str:
    return _open(np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])) + "Z"


def _box(plot: Plot, x_lo: float, x_hi: float, y_lo: float, y_hi: float) -> str:
    left, right = float(plot.across(x_lo)), float(plot.across(x_hi))
    low, high = float(plot.down(y_lo)), float(plot.down(y_hi))
    return f'<path class="shade" d="M{left:.1f} {low:.1f}V{high:.1f}H{right:.1f}V{low:.1f}Z"></path>'


def _rules(plot: Plot, rules: Sequence[Rule]) -> str:
    elements = []
    right, bottom = WIDTH - RIGHT, plot.top + PLOT_HEIGHT
    for rule in rules:
        if rule.along == "y":
            y = float(plot.down(rule.value))
            elements.append(f'<path class="rule" d="M{LEFT:.1f} {y:.1f}H{right:.1f}"></path>')
            line = y + 13 if rule.below or y < plot.top + 14 else y - 4
            attributes = f'class="end rule-label" x="{right - 4:.1f}" y="{line:.1f}"'
        else:
            x = float(plot.across(rule.value))
            elements.append(f'<path class="rule" d="M{x:.1f} {plot.top:.1f}V{bottom:.1f}"></path>')
            late = x > (LEFT + right) / 2
            side = "end rule-label" if late else "rule-label"
            attributes = f'class="{side}" x="{x - 4 if late else x + 4:.1f}" y="{plot.top + 13:.1f}"'
        elements.append(f"<text {attributes}>{escape(rule.label)}</text>")
    return element("g", "".join(elements)) if elements else ""
