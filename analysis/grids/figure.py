"""A figure of a grid: `python -m analysis.grids.figure GRID FILE.svg` draws one row per point of its axes.

Every run is a dot; the mean over seeds is a bar with its 95 % Student interval. With `--across SHARE` it draws the
measure against `removed` or `outside` instead, with the mean of each point, and shades the 10 to 40 % called good.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.grids.outcomes import MEASURES, outcomes
from analysis.program import program
from analysis.stats.significance import one_sample, t_interval
from ppo_repro.files import PICTURE, check_replaceable, write_over_earlier
from ppo_repro.output import Parser

WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 760.0, 230.0, 20.0, 12.0, 22.0, 42.0
GOOD = (0.1, 0.4)
COLOURS = ("#0072b2", "#d55e00")  # runs, their mean


def ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers in [low, high]."""
    step = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(step * f for f in (1, 2, 5) if (high - low) / (step * f) < 9)
    return [step * k for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def span(values: pd.Series) -> tuple[float, float]:
    """The range of an axis: the values', and a twentieth more on both sides."""
    low, high = float(values.min()), float(values.max())
    room = (high - low) / 20 or 0.5
    return low - room, high + room


def position(value: float, axis: tuple[float, float], start: float, end: float) -> float:
    return start + (value - axis[0]) / (axis[1] - axis[0]) * (end - start)


def text(x: float, y: float, content: str, anchor: str = "middle", turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(content)}</text>'


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.55"/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0) -> str:
    return (
        f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" stroke-width="{width:g}" '
        f'stroke-linecap="round"/>'
    )


def horizontal(axis: tuple[float, float], bottom: float, left: float, label: str) -> list[str]:
    """Grid lines, numbers and label of the horizontal axis."""
    elements = []
    for value in ticks(*axis):
        x = position(value, axis, left, WIDTH - RIGHT)
        elements += [line(x, TOP, x, bottom, "#d5d9e0"), text(x, bottom + 16, f"{value:g}")]
    return [*elements, text((left + WIDTH - RIGHT) / 2, bottom + 34, label)]


def svg(elements: Sequence[str], height: float, about: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}" '
        f'font-family="sans-serif" font-size="12" fill="#1b1f27"><title>{escape(about)}</title>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(elements)}</svg>\n'
    )


def by_point(cells: pd.DataFrame, measure: str, label: str) -> str:
    """One row per point of the axes, `label` below; values that are not finite are not drawn but counted."""
    axis = span(cells[measure])
    groups = list(cells.groupby("point", sort=False))
    bottom = TOP + ROW * len(groups)
    elements = horizontal(axis, bottom, LEFT, label)
    for row, (point, group) in enumerate(groups):
        y = TOP + ROW * (row + 0.5)
        values = group[measure].to_numpy(np.float64)
        finite = values[np.isfinite(values)]
        missing = "" if len(finite) == len(values) else f" ({len(values) - len(finite)} not finite)"
        elements.append(text(LEFT - 10, y + 4, f"{point}{missing}", "end"))
        elements += [dot(position(v, axis, LEFT, WIDTH - RIGHT), y, COLOURS[0]) for v in finite]
        if len(finite) > 1:
            estimate = one_sample(finite)
            low, high = (min(max(v, axis[0]), axis[1]) for v in t_interval(estimate, 0.95))
            if not math.isnan(low):
                ends = [position(v, axis, LEFT, WIDTH - RIGHT) for v in (low, high)]
                elements.append(line(ends[0], y, ends[1], y, COLOURS[1], 2))
            x = position(estimate.mean, axis, LEFT, WIDTH - RIGHT)
            elements.append(line(x, y - 6, x, y + 6, COLOURS[1], 2.5))
    return svg(elements, bottom + BOTTOM, f"{label}, by point of the axes")


def across(cells: pd.DataFrame, share: str, measure: str) -> str:
    """The measure of every run against its clipped share; the range called good is shaded."""
    left, bottom = 70.0, 360.0
    x_axis, y_axis = span(cells[share]), span(cells[measure])
    x_axis = (min(x_axis[0], 0.0), x_axis[1])
    good = [position(min(max(v, x_axis[0]), x_axis[1]), x_axis, left, WIDTH - RIGHT) for v in GOOD]
    size = f'width="{good[1] - good[0]:.1f}" height="{bottom - TOP:g}"'
    elements = [f'<rect x="{good[0]:.1f}" y="{TOP:g}" {size} fill="#00835f" fill-opacity="0.12"/>']
    elements += horizontal(x_axis, bottom, left, MEASURES[share])
    for value in ticks(*y_axis):
        y = position(value, y_axis, bottom, TOP)
        elements += [line(left, y, WIDTH - RIGHT, y, "#d5d9e0"), text(left - 8, y + 4, f"{value:g}", "end")]
    elements.append(text(18, (TOP + bottom) / 2, measure, turned=True))
    for point, group in cells.groupby("point", sort=False):
        finite = group[np.isfinite(group[share]) & np.isfinite(group[measure])]
        positions = [
            (position(x, x_axis, left, WIDTH - RIGHT), position(y, y_axis, bottom, TOP))
            for x, y in zip(finite[share], finite[measure], strict=True)
        ]
        elements += [dot(x, y, COLOURS[0]) for x, y in positions]
        if positions:
            x, y = np.mean(positions, axis=0).tolist()
            elements += [line(x - 5, y, x + 5, y, COLOURS[1], 2.5), text(x + 8, y + 4, str(point), "start")]
    return svg(elements, bottom + BOTTOM, f"{measure} against {share}")


@program
def main(argv: Sequence[str] | None) -> None:
    """Write the figure; exit code 2 and one line on a user error."""
    parser = Parser(prog="python -m analysis.grids.figure", description="a figure of a grid")
    parser.add_argument("grid", type=Path, help="folder of a grid")
    parser.add_argument("out", type=Path, help="the SVG file to write")
    parser.add_argument("--measure", choices=MEASURES, default="accuracy", help="what is drawn")
    parser.add_argument("--across", choices=("removed", "outside"), help="draw the measure against this share")
    arguments = parser.parse_args(argv)
    check_replaceable(arguments.out, PICTURE, "FILE.svg")
    cells, measure = outcomes(arguments.grid), arguments.measure
    if arguments.across is None:
        picture = by_point(cells, measure, MEASURES[measure])
    else:
        picture = across(cells, arguments.across, measure)
    write_over_earlier(arguments.out, PICTURE, picture.encode(), "FILE.svg")


if __name__ == "__main__":
    sys.exit(main())
