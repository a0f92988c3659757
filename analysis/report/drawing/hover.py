"""The values that a chart shows where the pointer is: positions in the picture with their text, for charts.js."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from analysis.report.drawing.axes import Axis, Floats
from analysis.report.drawing.markup import number, spread

# the plot is about this wide in pixels, so that more places could not be told apart
PLACES = 320
DIGITS = 6


@dataclass(frozen=True)
class Series:
    """What is said of one line, layer or group at each of its x: `low` and `high` where there is a band."""

    name: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None


def along(axis: Axis, series: Sequence[Series], across: Mapping[float, float]) -> str:
    """The values of every series at up to PLACES x; `across` has the position of each x in the picture."""
    every = np.array(sorted(across))
    chosen = [float(every[k]) for k in spread(len(every), PLACES)]
    rows = [{float(x): k for k, x in enumerate(one.x)} for one in series]
    places = []
    for x in chosen:
        said = [_said(one, row[x]) for one, row in zip(series, rows, strict=True) if x in row]
        places.append([round(across[x], 1), "\n".join([f"{axis.label} {number(x, DIGITS)}", *said])])
    return _attribute({"at": places})


def bins(names: Sequence[str], middles: Floats, groups: Sequence[tuple[str, Floats]]) -> str:
    """The values of every group in each bin; `middles` are positions in the picture."""
    places = []
    for k, (name, middle) in enumerate(zip(names, middles, strict=True)):
        said = [f"{group}: {number(float(values[k]), DIGITS)}" for group, values in groups]
        places.append([round(float(middle), 1), "\n".join([name, *said])])
    return _attribute({"at": places})


def cells(
    x_names: Sequence[str],
    y_names: Sequence[str],
    x_edges: Floats,
    y_edges: Floats,
    counts: npt.NDArray[np.number],
    what: str,
) -> str:
    """The count of the cell under the pointer; edges are positions in the picture. Cells without one say 0."""
    found = {f"{i},{j}": number(float(counts[i, j]), DIGITS) for i, j in np.argwhere(counts).tolist()}
    edges = {"xe": _rounded(x_edges), "ye": _rounded(y_edges)}
    return _attribute({**edges, "xn": [*x_names], "yn": [*y_names], "cells": found, "what": what})


def between(label: str, edges: Floats) -> list[str]:
    """The name of each bin from its edges, such as `ratio 0.9 to 1.1`."""
    ends = [number(float(edge)) for edge in edges]
    return [f"{label} {lo} to {hi}" for lo, hi in pairwise(ends)]


def _said(one: Series, k: int) -> str:
    text = f"{one.name}: " if one.name else ""
    text += number(float(one.y[k]), DIGITS)
    if one.low is None or one.high is None or not math.isfinite(float(one.low[k] + one.high[k])):
        return text
    return f"{text} ({number(float(one.low[k]))} to {number(float(one.high[k]))})"


def _rounded(values: Floats) -> list[float]:
    return [round(float(value), 1) for value in values]


def _attribute(value: dict[str, object]) -> str:
    """JSON as the value of an attribute in double quotes; ASCII, so that nothing in it is invisible."""
    return html.escape(json.dumps(value, ensure_ascii=True, separators=(",", ":")), quote=True)
