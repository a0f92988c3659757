"""Axes, charts and markup: positions and ticks by hand, safety and order as properties."""

import csv
import io
import json
import math
import xml.etree.ElementTree as ET
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.report.charts import (
    LEFT,
    PLOT_HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Line,
    Rule,
    area_chart,
    axis_for,
    bar_chart,
    heat_levels,
    heat_map,
    line_chart,
    ticks,
)
from analysis.report.markup import element, escape, number, share, table
from analysis.report.page import csv_link

FINITE = st.floats(-1e12, 1e12)


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def paths(svg: str, name: str) -> list[str]:
    return [p.get("d", "") for p in parsed(svg).iter("path") if name in (p.get("class") or "").split()]


def test_a_line_goes_where_its_numbers_say() -> None:
    x, y = Axis("x", 0.0, 10.0), Axis("y", 0.0, 1.0)
    svg = line_chart([Line("a", np.array([0.0, 10.0]), np.array([0.0, 1.0]))], x, y, "about")
    bottom = TOP + PLOT_HEIGHT
    assert paths(svg, "line") == [f"M{LEFT:.1f} {bottom:.1f}L{WIDTH - RIGHT:.1f} {TOP:.1f}"]
    assert parsed(svg).get("role") == "img" and parsed(svg).get("aria-label") == "about"


def test_a_missing_value_is_a_gap_and_never_a_point() -> None:
    x, y = Axis("x", 0.0, 4.0), Axis("y", 0.0, 1.0)
    values = np.array([0.0, 0.5, np.nan, 0.5, 1.0])
    svg = line_chart([Line("a", np.arange(5.0), values)], x, y, "")
    assert paths(svg, "line")[0].count("M") == 2 and paths(svg, "line")[0].count("L") == 2
    assert len(list(parsed(svg).iter("circle"))) == 4 and "nan" not in svg


def test_a_logarithmic_axis_by_hand() -> None:
    axis = Axis("p", 1e-4, 1.0, True)
    assert axis.at(np.array([1e-4, 1e-3, 1e-2, 1.0])).tolist() == pytest.approx([0.0, 0.25, 0.5, 1.0])
    # nothing of zero or below has a place on it: it lies at the bottom; NaN has none
    assert axis.at(np.array([0.0, -1.0])).tolist() == [0.0, 0.0] and math.isnan(float(axis.at(math.nan)))
    assert [label for _, label in ticks(axis)] == ["1e-4", "0.001", "0.01", "0.1", "1"]


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_lie_inside_and_are_evenly_apart(lo: float, width: float) -> None:
    axis = Axis("x", lo, lo + width)
    places = [value for value, _ in ticks(axis)]
    assert 1 <= len(places) <= 7
    assert all(lo - 1e-6 * width <= value <= lo + width * (1 + 1e-6) for value in places)
    # labels are rounded to what can be told apart
    assert len(places) < 3 or np.ptp(np.diff(places)) <= 1e-3 * width


@given(st.lists(st.one_of(FINITE, st.just(math.nan), st.just(math.inf)), max_size=20), st.booleans())
def test_an_axis_holds_every_finite_value(values: list[float], log: bool) -> None:
    axis = axis_for("x", [np.array(values)], log=log)
    assert axis.lo < axis.hi
    held = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    # powers of ten are not exact below 1
    assert all(axis.lo * (1 - 1e-12 if log else 1) <= value <= axis.hi * (1 + 1e-12 if log else 1) for value in held)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_heat_levels_keep_the_order_and_nothing_stays_nothing(counts: list[int]) -> None:
    found = np.array(counts)
    level = heat_levels(found)
    assert ((level == 0) == (found == 0)).all() and level.max() <= 9
    order = np.argsort(found, kind="stable")
    assert (np.diff(level[order]) >= 0).all()
    assert level[found.argmax()] == (9 if found.max() else 0)


def test_areas_stack_to_their_sum() -> None:
    at, x, y = np.array([0.0, 1.0]), Axis("x", 0.0, 1.0), Axis("y", 0.0, 1.0)
    svg = area_chart(at, [("a", np.array([0.25, 0.5])), ("b", np.array([0.75, 0.5]))], x, y, "")
    first, second = paths(svg, "area")
    top = float(first.split(" ")[1].split("L")[0]) - PLOT_HEIGHT
    assert first.endswith(f"{top + 0.75 * PLOT_HEIGHT:.1f}Z") and second.endswith(f"{top:.1f}Z"), "they fill the plot"


def test_bars_and_cells_are_drawn_where_something_is() -> None:
    x, y, edges = Axis("x", 0.0, 3.0), Axis("y", 0.0, 4.0), np.arange(4.0)
    assert paths(bar_chart(edges, [("n", np.array([4.0, 0.0, 1.0]))], x, y, ""), "bar")[0].count("M") == 2
    counts = np.zeros((3, 3))
    counts[0, 0], counts[2, 1] = 1, 1000
    svg = heat_map(edges, edges, counts, x, Axis("y", 0.0, 3.0), "", rules=(Rule(1.0, "one"),))
    assert [len(paths(svg, f"heat{k}")) for k in (1, 5, 9)] == [1, 0, 1]
    assert "one" in "".join(parsed(svg).itertext()), "the legend names the line"


TEXT = st.text(st.characters(codec="utf-8"))


@given(TEXT, TEXT)
def test_whatever_the_text_it_is_text(inside: str, value: str) -> None:
    found = ET.fromstring(element("p", escape(inside), title=value))
    assert list(found) == [] and found.tag == "p" and set(found.attrib) == {"title"}
    assert not set("\x00\x01\x1b\u202e\u2066\ufeff\u2028") & set(found.text or "")
    kept = inside.replace("\n", "↵\n").replace("\t", "⇥")
    if all(32 <= ord(c) < 0x7F or c in "\n\t" for c in inside):
        assert (found.text or "") == kept


NUMBERS = [
    (0.0, "0"), (-0.0, "-0"), (1.0, "1"), (22.0, "22"), (0.20899, "0.209"), (1234.567, "1,235"), (12.3456, "12.35"),
    (2.277e-5, "2.277e-05"), (1e20, "1e+20"), (math.nan, "–"), (math.inf, "inf"), (123456, "123,456"), (True, "yes"),
    ("text", "text"), (np.float64(1.5), "1.5"), (np.int64(1000), "1,000"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "said"), NUMBERS)
def test_numbers_as_people_read_them(value: object, said: str) -> None:
    assert number(value) == said


SHARES = [
    (0, 10, "0 %"), (10, 10, "100 %"), (0, 0, "0 %"), (1, 100_000, "0.001 %"), (33_663, 100_706, "33 %"),
    (652, 10_000, "6.5 %"),
    (99_999, 100_000, "99.99 %"), (999, 1000, "99.90 %"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "whole", "said"), SHARES)
def test_a_share_is_never_rounded_to_all_or_nothing(part: int, whole: int, said: str) -> None:
    assert share(part, whole) == said


def test_a_table_says_how_many_of_its_rows_it_shows() -> None:
    frame = pd.DataFrame({"n": range(500), "text": ["<b>"] * 500})
    found = ET.fromstring(table(frame, "numbers", limit=50))
    assert len(list(found.iter("tr"))) == 51 and found.findtext("caption") == "numbers (50 of 500 rows, evenly spread)"
    assert next(found.iter("bdi")).text == "<b>"


def hovered(svg: str) -> Any:
    return json.loads(parsed(svg).get("data-hover") or "null")


def test_the_pointer_finds_the_values_of_lines_bars_and_cells() -> None:
    x, y, edges = Axis("step", 0.0, 10.0), Axis("y", 0.0, 1.0), np.array([0.0, 1.0, 3.0])
    first = Line("a", np.array([0.0, 10.0]), np.array([0.25, 1.0]), np.array([0.0, np.nan]), np.array([0.5, np.nan]))
    svg = line_chart([first, Line("b", np.array([10.0]), np.array([np.nan]))], x, y, "")
    assert hovered(svg) == {"at": [[LEFT, "step 0\na: 0.25 (0 to 0.5)"], [WIDTH - RIGHT, "step 10\na: 1\nb: –"]]}
    p, q = Axis("p", 0.0, 3.0), Axis("q", 0.0, 3.0)
    found = hovered(heat_map(edges, edges, np.array([[0, 7], [0, 0]]), p, q, "", what="rows", x_names=["low", "high"]))
    assert found["cells"] == {"0,1": "7"} and found["xn"] == ["low", "high"] and found["yn"] == ["q 0 to 1", "q 1 to 3"]
    assert found["xe"] == [LEFT, pytest.approx(LEFT + (WIDTH - LEFT - RIGHT) / 3, abs=0.05), WIDTH - RIGHT]
    bars = hovered(bar_chart(edges, [("n", np.array([4.0, 0.0]))], p, Axis("n", 0.0, 4.0), ""))
    assert [text for _, text in bars["at"]] == ["p 0 to 1\nn: 4", "p 1 to 3\nn: 0"]


FRAMES = st.lists(
    st.tuples(st.integers(), st.floats(), st.text(st.characters(codec="utf-8", exclude_characters="\r\0")))
)


@given(FRAMES)
def test_a_saved_table_has_every_bit_of_the_numbers(rows: list[tuple[int, float, str]]) -> None:
    frame = pd.DataFrame({"n": [r[0] for r in rows], "x": np.array([r[1] for r in rows]), "t": [r[2] for r in rows]})
    link = ET.fromstring(csv_link("A title, with words", frame))
    assert link.get("download") == "a-title-with-words.csv"
    kind, _, text = (link.get("href") or "").partition(",")
    assert kind == "data:text/csv;charset=utf-8" and text.isascii() and not set(' #<>/"') & set(text)
    found = list(csv.reader(io.StringIO(unquote(text), newline="")))
    assert found[0] == ["n", "x", "t"] and [row[0] for row in found[1:]] == [str(r[0]) for r in rows]
    again = np.array([float(row[1] or "nan") for row in found[1:]], dtype=np.float64)
    assert np.array_equal(again, frame["x"].to_numpy(np.float64), equal_nan=True)
