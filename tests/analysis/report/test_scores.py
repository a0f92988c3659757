"""Distributions of scores: bins by hand and by definition, and their figures."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.report.drawing.figure import figure_html
from analysis.report.figures.scores import BINS, MAX_VALUES, bins_of, distribution_figures

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(VALUES)
def test_every_value_is_in_the_bin_that_its_definition_says(values: list[float]) -> None:
    data = np.array(values)
    bins = bins_of(data, "score")
    slow = [0] * len(bins.names)
    for value in values:
        if bins.distinct is not None:
            slow[bins.distinct.tolist().index(value)] += 1
        else:
            inside = [k for k in range(BINS) if bins.edges[k] <= value < bins.edges[k + 1]]
            slow[inside[0] if inside else BINS - 1] += 1
    assert bins.counts(data).tolist() == slow and sum(slow) == len(values)
    assert (bins.distinct is not None) == (len(set(values)) <= MAX_VALUES)


def test_two_scores_are_two_bars_and_the_ends_are_compared() -> None:
    values = {0: np.array([0.0, 0.0, 0.0, 1.0]), 1: np.array([1.0, np.nan]), 2: np.array([1.0, 1.0, 0.0, 1.0])}
    bars, shades = distribution_figures(values, "score", "responses")
    assert bars.numbers.to_dict("list") == {"score": ["0", "1"], "iteration 0": [3, 1], "iteration 2": [1, 3]}
    assert shades.numbers["responses"].tolist() == [3, 1, 1, 1, 3], "what is not finite is in no bin"
    for figure in (bars, shades):
        ET.fromstring(figure_html(figure))
    (alone,) = distribution_figures({4: np.array([0.5])}, "score", "responses")
    assert alone.numbers["iteration 4"].tolist() == [1]
    assert distribution_figures({0: np.array([np.nan])}, "score", "responses") == ()


@pytest.mark.parametrize("count", [1, 79, 80, 81, 400])
def test_many_iterations_share_columns_and_none_is_lost(count: int) -> None:
    values = {i: np.array([float(i % 3)]) for i in range(count)}
    figures = distribution_figures(values, "score", "responses")
    if count > 1:
        assert figures[1].numbers["responses"].sum() == count
