"""Axes, charts and markup: positions and ticks by hand, safety and order as properties."""

import csv
import io
import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.analysis.html.axes import Axis, Tick, axis_for, ticks
from ppo_repro.analysis.html.charts import CHARACTER, LEFT, PLOT_HEIGHT, RIGHT, TOP, WIDTH, Line, bar_chart, line_chart
from ppo_repro.analysis.html.markup import element, escape, percentage, sentence
from ppo_repro.analysis.html.page import csv_link

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
    assert parsed(svg).get("role") == "img"
    assert parsed(svg).get("aria-label") == "about"


def test_a_missing_value_is_a_gap_and_never_a_point() -> None:
    x, y = Axis("x", 0.0, 4.0), Axis("y", 0.0, 1.0)
    values = np.array([0.0, 0.5, np.nan, 0.5, 1.0])
    svg = line_chart([Line("a", np.arange(5.0), values)], x, y, "")
    assert paths(svg, "line")[0].count("M") == 2
    assert paths(svg, "line")[0].count("L") == 2
    assert len(list(parsed(svg).iter("circle"))) == 4
    assert "nan" not in svg


def test_a_logarithmic_axis_by_hand() -> None:
    axis = Axis("p", 1e-4, 1.0, True)
    assert axis.at(np.array([1e-4, 1e-3, 1e-2, 1.0])).tolist() == pytest.approx([0.0, 0.25, 0.5, 1.0])
    # nothing of zero or below has a place on it: it lies at the bottom; NaN has none
    assert axis.at(np.array([0.0, -1.0])).tolist() == [0.0, 0.0]
    assert math.isnan(float(axis.at(math.nan)))
    assert [label for _, label in ticks(axis)] == ["1e-4", "0.001", "0.01", "0.1", "1"]


@given(st.lists(st.one_of(FINITE, st.just(math.nan), st.just(math.inf)), max_size=20), st.booleans())
def test_an_axis_holds_every_finite_value(values: list[float], log: bool) -> None:
    axis = axis_for("x", [np.array(values)], log=log)
    assert axis.lo < axis.hi
    held = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    # powers of ten are not exact below 1
    assert all(axis.lo * (1 - 1e-12 if log else 1) <= value <= axis.hi * (1 + 1e-12 if log else 1) for value in held)


TEXT = st.text(st.characters(codec="utf-8"))


@given(TEXT, TEXT)
def test_whatever_the_text_it_is_text(inside: str, value: str) -> None:
    found = ET.fromstring(element("p", escape(inside), title=value))
    assert list(found) == []
    assert found.tag == "p"
    assert set(found.attrib) == {"title"}
    assert not set("\x00\x01\x1b\u202e\u2066\ufeff\u2028") & set(found.text or "")
    kept = inside.replace("\n", "↵\n").replace("\t", "⇥")
    if all(32 <= ord(c) < 0x7F or c in "\n\t" for c in inside):
        assert (found.text or "") == kept


SHARES = [
    (0, 10, "0 %"), (10, 10, "100 %"), (0, 0, "0 %"), (1, 100_000, "0.001 %"), (33_663, 100_706, "33 %"),
    (652, 10_000, "6.5 %"),
    (99_999, 100_000, "99.99 %"), (999, 1000, "99.90 %"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "whole", "said"), SHARES)
def test_a_share_is_never_rounded_to_all_or_nothing(part: int, whole: int, said: str) -> None:
    assert percentage(part, whole) == said


def test_a_sentence_begins_with_a_capital_letter_or_a_field() -> None:
    assert sentence("log-probs differ") == "Log-probs differ."
    assert sentence("rollout.engine promises no bits") == "rollout.engine promises no bits."
    assert sentence("did you forget --temperature?") == "Did you forget --temperature?"


FRAMES = st.lists(
    st.tuples(st.integers(), st.floats(), st.text(st.characters(codec="utf-8", exclude_characters="\r\0")))
)


@given(FRAMES)
def test_a_saved_table_has_every_bit_of_the_numbers(rows: list[tuple[int, float, str]]) -> None:
    frame = pd.DataFrame({"n": [r[0] for r in rows], "x": np.array([r[1] for r in rows]), "t": [r[2] for r in rows]})
    link = ET.fromstring(csv_link("A title, with words", frame))
    assert link.get("download") == "a-title-with-words.csv"
    kind, _, text = (link.get("href") or "").partition(",")
    assert kind == "data:text/csv;charset=utf-8"
    assert text.isascii()
    assert not set(' #<>/"') & set(text)
    found = list(csv.reader(io.StringIO(unquote(text), newline="")))
    assert found[0] == ["n", "x", "t"]
    assert [row[0] for row in found[1:]] == [str(r[0]) for r in rows]
    again = np.array([float(row[1] or "nan") for row in found[1:]], dtype=np.float64)
    assert np.array_equal(again, frame["x"].to_numpy(np.float64), equal_nan=True)


def test_labels_below_the_plot_never_overlap_and_every_value_keeps_its_line() -> None:
    marks = tuple(Tick(k + 0.5, f"-0.{k}23") for k in range(12))
    svg = bar_chart(np.arange(13.0), {"a": np.ones(12)}, Axis("score", 0.0, 12.0, ticks=marks), Axis("%", 0, 1), "")
    labels = [n for n in parsed(svg).iter("text") if (n.text or "").startswith("-0.")]
    ends = [(float(n.get("x", "")), len(n.text or "") * CHARACTER / 2) for n in labels if n.get("class") == "middle"]
    assert 4 <= len(ends) < 12
    assert all(a + half <= b - other for (a, half), (b, other) in pairwise(ends))
    assert len(paths(svg, "grid")) >= 12
