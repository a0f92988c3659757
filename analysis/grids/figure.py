"""A figure of a grid: `python -m analysis.grids.figure GRID FILE.svg` draws one row per setting.

Every run is a dot; the mean over seeds is a bar with its 95 % Student interval. With `--across SHARE` it draws the
measure against `removed` or `outside` instead, with the mean of each setting, and shades the 10 to 40 % called good.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.grids.outcomes import MEASURES, outcomes
from analysis.program import program
from analysis.stats.significance import one_sample, t_interval
from ppo_repro.errors import UserError
from ppo_repro.files import PICTURE, check_replaceable, write_over_earlier
from ppo_repro.output import Parser

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOOD = (0.1, 0.4)
RUN, MEAN = "#0072b2", "#d55e00"
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "ppo_repro", "font.family": "sans-serif", "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#d5d9e0",
    "axes.axisbelow": True,
}  # fmt: skip


def new_figure(width: float, height: float, columns: int = 1) -> tuple[object, list[Axes]]:
    """A matplotlib figure of this size in inches, in our style, and its axes; UserError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("figures need matplotlib; install it with pip install 'ppo_repro[notebook]'") from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        axes = [figure.add_subplot(1, columns, k + 1) for k in range(columns)]
    return figure, axes


def svg(figure: object) -> str:
    """The figure as SVG; the same figure gives the same text."""
    import matplotlib
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    width, height = (72 * inches for inches in figure.get_size_inches())
    namespaces = 'xmlns="http://www.w3.org/2000/svg"', 'xmlns:xlink="http://www.w3.org/1999/xlink"'
    inside = buffer.getvalue().partition("<svg ")[2].partition(">")[2]
    return f'<svg {namespaces[0]} viewBox="0 0 {width:g} {height:g}" {namespaces[1]} width="{width:g}">{inside}'


def by_point(cells: pd.DataFrame, measure: str, label: str) -> str:
    """One row per setting, `label` below; values that are not finite are not drawn but counted."""
    groups = list(cells.groupby("point", sort=False))
    figure, (axes,) = new_figure(8.0, 0.8 + 0.3 * len(groups))
    names = []
    for row, (point, group) in enumerate(groups):
        values = group[measure].to_numpy(np.float64)
        finite = values[np.isfinite(values)]
        missing = "" if len(finite) == len(values) else f" ({len(values) - len(finite)} not finite)"
        names.append(f"{point}{missing}")
        axes.plot(finite, np.full(len(finite), row), "o", color=RUN, alpha=0.55, markersize=5)
        if len(finite) > 1:
            estimate = one_sample(finite)
            axes.plot(t_interval(estimate, 0.95), (row, row), color=MEAN, linewidth=2)
            axes.plot([estimate.mean], [row], "|", color=MEAN, markersize=11, markeredgewidth=2.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(label)
    return svg(figure)


def across(cells: pd.DataFrame, share: str, measure: str) -> str:
    """The measure of every run against its clipped share; the range called good is shaded."""
    figure, (axes,) = new_figure(8.0, 4.2)
    axes.axvspan(*GOOD, color="#00835f", alpha=0.12)
    axes.plot(cells[share], cells[measure], "o", color=RUN, alpha=0.55, markersize=5)
    for point, mean in cells.groupby("point", sort=False)[[share, measure]].mean().iterrows():
        axes.plot([mean[share]], [mean[measure]], "_", color=MEAN, markersize=11, markeredgewidth=2.5)
        axes.annotate(str(point), (mean[share], mean[measure]), xytext=(7, -3), textcoords="offset points")
    axes.set_xlabel(MEASURES[share])
    axes.set_ylabel(measure)
    return svg(figure)


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
