"""The figures of analyses, from small frames: the chart and its caption."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pandas as pd
import pytest

from analysis.report.drawing.figure import Figure, figure_html
from analysis.report.figures import counts
from analysis.report.figures.clipping import (
    ClipBounds,
    definition_figure,
    extremes_figure,
    flag_figure,
    overshoot_figure,
    quadrant_figure,
    ratio_figure,
)
from analysis.report.figures.mismatch import bucket_figure, delta_figure, divergence_figure, probability_figure
from analysis.report.figures.units import share_figure, unit_figure

BOUNDS = ClipBounds(0.8, 1.2, False)


def drawn(figure: Figure) -> tuple[ET.Element, str]:
    """The chart and all that is said, after a look at the whole figure as markup."""
    ET.fromstring(figure_html(figure))
    chart = ET.fromstring(figure.chart)
    return chart, f"{chart.get('aria-label')} {figure.caption} {' '.join(chart.itertext())}"


def count(chart: ET.Element, name: str) -> int:
    return sum(path.get("d", "").count("M") for path in chart.iter("path") if name in (path.get("class") or "").split())


def test_probability_says_how_much_lies_on_the_diagonal() -> None:
    grid = np.zeros((36, 36), np.int64)
    grid[35, 35], grid[3, 3], grid[3, 4] = 60, 30, 10
    chart, said = drawn(probability_figure(grid))
    assert "90 % of 100 tokens are in the same bin" in said
    assert sum(count(chart, f"heat{k}") for k in range(1, 10)) == 3


def test_delta_shows_zero_in_the_middle_and_both_sides() -> None:
    found = counts.histogram(np.array([0.0, 0.0, 3e-6, -3e-6, -2e-4]), counts.DELTA_EDGES)
    figure = delta_figure(found)
    chart, said = drawn(figure)
    assert "40 % of 5 tokens are within 1e-9" in said and count(chart, "bar") == 4
    assert figure.numbers["tokens"].sum() == 5 and "-1e-4" in said and "1e-4" in said


def buckets() -> pd.DataFrame:
    rows = [("prob", 0.0, 0.1, 5, 2e-6, 4e-6, 5e-6), ("prob", 0.1, 1.0, 50, 1e-7, 3e-7, 4e-7)]
    rows += [("position", 0.0, 1.0, 10, 1e-7, 2e-7, 3e-7), ("prob", 0.05, 0.1, 0, np.nan, np.nan, np.nan)]
    return pd.DataFrame(rows, columns=["kind", "lo", "hi", "n", "abs_mean", "abs_p99", "abs_max"])


@pytest.mark.parametrize(("kind", "bars"), [("prob", 6), ("position", 3)])
def test_buckets_have_a_bar_for_mean_percentile_and_largest(kind: str, bars: int) -> None:
    figure = bucket_figure(buckets(), kind)
    chart, said = drawn(figure)
    assert count(chart, "bar") == bars and len(figure.numbers) == bars // 3
    assert ("2e-06 nats in the first bucket, 1e-07 in the last" in said) == (kind == "prob")


def test_divergences_leave_out_what_is_zero() -> None:
    rows = [(i, metric, value, 1e-9) for i in range(3) for metric, value in (("k1", -1e-8), ("k2", 1e-12), ("k3", 0.0))]
    figure = divergence_figure(pd.DataFrame(rows, columns=["iteration", "metric", "value", "se"]))
    chart, said = drawn(figure)
    assert "|k1| 1e-08, k2 1e-12" in said and count(chart, "line") == 2 and len(figure.numbers) == 9


def test_ratios_are_columns_of_shares_with_the_bounds() -> None:
    updates = pd.DataFrame(
        {"epoch": [0, 0, 1, 1], "minibatch": [0, 0, 0, 0], "ratios": np.array([1.0, 1.0, 1.0, 2.0], np.float32)}
    )
    figure = ratio_figure(counts.ratio_histogram(updates), BOUNDS)
    chart, said = drawn(figure)
    assert "About 25 % lie outside the bounds." in said and "upper bound 1.2" in said
    assert sum(count(chart, f"heat{k}") for k in range(1, 10)) == 3 and count(chart, "rule") == 2
    assert figure.numbers["tokens"].tolist() == [2, 2]
    assert "no clip bounds" in drawn(ratio_figure(counts.ratio_histogram(updates), None))[1]


def test_flags_are_shares_and_add_up() -> None:
    flags = pd.DataFrame([{"iteration": i, **dict.fromkeys(counts.FLAGS, 0), "token_updates": 100} for i in range(2)])
    flags["clip_high"], flags["wrong_low"] = [10, 20], [0, 5]
    chart, said = drawn(flag_figure(flags))
    assert "Of 200 token updates the clip removed the gradient of 15 %; 2.5 % were outside" in said
    assert count(chart, "area") == 2, "flags that never occur have no layer"


def test_quadrants_shade_the_two_regions_without_gradient() -> None:
    grid = counts.histogram_2d(np.array([1.0]), np.array([1.5]), counts.ADVANTAGE_EDGES, counts.RATIO_EDGES)
    assert count(drawn(quadrant_figure(grid, BOUNDS))[0], "shade") == 2
    assert count(drawn(quadrant_figure(grid, None))[0], "shade") == 0


def test_extremes_and_overshoot() -> None:
    extremes = pd.DataFrame(
        {"iteration": [0, 1], "min_ratio": [0.5, 0.1], "max_ratio": [1.5, 7.25], "nonfinite_ratios": 0}
    )
    chart, said = drawn(extremes_figure(extremes, BOUNDS))
    assert "Largest ratio of all: 7.25." in said and count(chart, "line") == 2 and count(chart, "rule") == 2
    over = pd.DataFrame({"epoch": [0, 0, 1, 1], "beyond": [0.1, 1.0] * 2, "count": [5, 0, 10, 1], "total": [100] * 4})
    chart, said = drawn(overshoot_figure(over))
    assert "epoch 0: 0.05 beyond 0.1; epoch 1: 0.1 beyond 0.1" in said and count(chart, "line") == 1


def test_definitions_are_weighted_by_tokens() -> None:
    steps = pd.DataFrame(
        [(0, 100, 0.2, 0.1, 0.0), (0, 300, 0.4, 0.3, 0.0), (1, 0, np.nan, np.nan, np.nan), (1, 400, 0.1, 0.05, 0.0)],
        columns=["iteration", "n_tok", "band_out", "grad_zero", "clip_floor"],
    )
    figure = definition_figure(steps)
    assert figure.numbers["band_out"].tolist() == pytest.approx([0.35, 0.1])
    assert "outside the band 22.5 %, gradient removed 15 %, without any step 0 %" in drawn(figure)[1]


def text_sums() -> pd.DataFrame:
    row = {"sequences": 2, "tokens": 8, "words": 4, "characters": 16, "bytes": 32}
    for part, kl, entropy, tokens in (("first", 3.0, 1.0, 4), ("continuation", 1.0, 3.0, 2), ("special", 0.0, 0.0, 2)):
        row |= {f"kl_{part}": kl, f"entropy_{part}": entropy, f"tokens_{part}": tokens}
    return pd.DataFrame([{"iteration": i, **row} for i in range(2)])


def test_units_divide_one_sum_by_five_counts() -> None:
    figure = unit_figure(text_sums())
    assert figure.numbers.iloc[-1].tolist() == [1, 2.0, 1.0, 0.5, 0.25, 0.125]
    assert "2 per response, 1 per word, 0.5 per token" in drawn(figure)[1]


@pytest.mark.parametrize(("quantity", "first"), [("kl", 0.75), ("entropy", 0.25)])
def test_shares_of_words(quantity: str, first: float) -> None:
    figure = share_figure(text_sums(), quantity)
    assert figure.numbers["first tokens of words"].tolist() == [first, first]
    chart, said = drawn(figure)
    assert "50 % first tokens of words, 25 % later tokens, 25 % special tokens" in said and count(chart, "area") == 3
