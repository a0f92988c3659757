"""The counts behind the figures, by hand and against the records of training; the figures, from small frames."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from analysis.report import counts, curves, figures
from analysis.report.facts import read_facts
from analysis.report.figures import ClipBounds
from analysis.report.page import Figure, figure_html
from analysis.report.scan import scan_run, summary_tables
from analysis.report.tokens import select, token_data
from ppo_repro.records import reader

ANY_FLOAT = st.one_of(st.floats(-50, 50), st.just(math.nan), st.just(math.inf), st.just(-math.inf))
BOUNDS = ClipBounds(0.8, 1.2)


@given(arrays.arrays(np.float64, st.integers(0, 60), elements=ANY_FLOAT))
def test_histograms_are_what_their_definition_says(values: np.ndarray) -> None:
    edges = counts.LOG_RATIO_EDGES
    slow = np.zeros(len(edges) - 1, dtype=np.int64)
    for value in values[np.isfinite(values)]:  # the outer bins reach to infinity
        slow[next((k for k in range(len(edges) - 1) if value < edges[k + 1]), len(edges) - 2)] += 1
    assert (counts.histogram(values, edges) == slow).all()


def test_two_dimensions_flags_and_extremes_by_hand() -> None:
    edges = np.array([0.0, 1.0, 2.0])
    x, y = np.array([0.5, 0.5, 1.5, 9.0, math.nan]), np.array([0.5, 1.5, 0.2, -3.0, 0.5])
    assert counts.histogram_2d(x, y, edges, edges).tolist() == [[1, 1], [2, 0]]
    ratios = np.array([1.0, 1.5, 0.5, 3.0, math.inf, math.nan], np.float32)
    updates = pd.DataFrame({"ratios": ratios, "clip_flag": ["none"] * 4 + ["clip_high", None]})
    flags, extremes = counts.flag_row(4, updates), counts.extremes_row(4, updates)
    assert flags["clip_high"] == 1 and flags["token_updates"] == 5
    assert (extremes["min_ratio"], extremes["max_ratio"]) == (0.5, 3.0)
    assert extremes["nonfinite_ratios"] == 1, "infinity is broken, null is none at all"


def test_standard_errors_and_intervals_by_hand() -> None:
    assert curves.mean_and_error(np.array([1.0, 3.0])) == (2.0, 1.0)
    assert math.isnan(curves.mean_and_error(np.array([1.0]))[1])
    # three responses: sums 2, 2, 5 over 1, 2, 3 tokens; ratio 1.5, residuals 0.5, -1, 0.5
    ratio, error = curves.ratio_and_error(np.array([2.0, 2.0, 5.0]), np.array([1.0, 2.0, 3.0]))
    assert ratio == 1.5 and error == pytest.approx(math.sqrt(1.5 * 1.5) / 6)

    def seed(value: float, iterations: list[int]) -> pd.DataFrame:
        return pd.DataFrame({"iteration": iterations, "metric": "score", "value": value, "low": 0.0, "high": 0.0})

    found = curves.over_seeds([seed(1.0, [0, 1]), seed(3.0, [0]), seed(math.nan, [0])]).set_index("iteration")
    # standard error 1, t of 1 degree of freedom at 97.5 % 12.706
    assert found.loc[0, ["value", "low", "high", "seeds"]].tolist() == pytest.approx([2, -10.706, 14.706, 2], abs=1e-3)
    assert found.loc[1, "value"] == 1.0 and math.isnan(found.loc[1, "low"])


def test_a_scan_agrees_with_what_training_recorded(deterministic_run: Path) -> None:
    facts = read_facts(deterministic_run)
    iterations, steps = summary_tables(facts)
    scan = scan_run(facts, iterations, steps)
    held_out = scan.curves[scan.curves["metric"] == "eval_accuracy"].sort_values("iteration")
    measured = iterations[iterations["eval_accuracy"].notna()]
    assert held_out["iteration"].tolist() == [*measured["iteration"], len(iterations)]
    assert held_out["value"].tolist() == [*measured["eval_accuracy"], float(facts.manifest.final["eval_accuracy"])]
    recorded = {
        "score": "score_mean", "accuracy": "accuracy", "ref_kl_per_sequence": "ref_kl_per_sequence",
        "entropy": "entropy", "response_length": "response_length_mean", "explained_variance": "explained_variance",
    }  # fmt: skip
    for metric, column in recorded.items():
        values = scan.curves[scan.curves["metric"] == metric].sort_values("iteration")["value"].to_numpy()
        # training adds up exactly, pandas in some order: float64 rounding of a few hundred terms
        assert values == pytest.approx(iterations[column].to_numpy(), rel=1e-12), metric
    weighted = (steps["clip_fraction"] * steps["tokens"]).groupby(steps["iteration"]).sum().to_numpy()
    assert scan.flags[["clip_high", "clip_low", "clip_dual"]].sum(axis=1).to_numpy() == pytest.approx(weighted)
    visits = int(steps["tokens"].sum())
    assert scan.flags["token_updates"].sum() == scan.ratios["count"].sum() == scan.quadrants.sum() == visits
    tokens = reader.read_tokens(deterministic_run)
    assert scan.probabilities.sum() == np.trace(scan.probabilities) == scan.deltas.sum() == len(tokens)


def test_the_token_view_has_what_the_records_have(native_run: Path) -> None:
    facts = read_facts(native_run)
    data = token_data(native_run, select(scan_run(facts, *summary_tables(facts)).responses, 12))
    assert len(data["responses"]) == 12
    keys = [column["key"] for column in data["columns"]]
    assert {"delta", "ratio_0", "ratio_1", "flag_0", "flag_1", "values", "advantages", "ref_kl"} <= set(keys)
    tokens, updates = reader.read_tokens(native_run), reader.read_updates(native_run)
    for shown in data["responses"]:
        mine, second = (
            frame[(frame["iteration"] == shown["iteration"]) & (frame["sequence"] == shown["sequence"])]
            for frame in (tokens, updates[updates["epoch"] == 1])
        )
        second = second.sort_values("position")
        assert shown["ids"] == mine["token_id"].tolist() and "".join(shown["texts"]) == shown["response"]
        # six significant digits are promised
        assert shown["columns"]["entropies"] == pytest.approx(mine["entropies"].to_list(), rel=5e-6, abs=1e-30)
        assert shown["columns"]["ratio_1"] == pytest.approx(second["ratios"].to_list(), rel=5e-6)
        assert shown["columns"]["flag_1"] == second["clip_flag"].tolist()


def drawn(figure: Figure) -> tuple[ET.Element, str]:
    """The chart and all that is said, after a look at the whole figure as markup."""
    ET.fromstring(figure_html(figure))
    chart = ET.fromstring(figure.chart)
    return chart, f"{chart.get('aria-label')} {figure.caption} {' '.join(chart.itertext())}"


def count(chart: ET.Element, name: str) -> int:
    return sum(path.get("d", "").count("M") for path in chart.iter("path") if name in (path.get("class") or "").split())


def test_clipping_figures() -> None:
    updates = pd.DataFrame(
        {"epoch": [0, 0, 1, 1], "minibatch": [0, 0, 0, 0], "ratios": np.array([1.0, 1.0, 1.0, 2.0], np.float32)}
    )
    chart, said = drawn(figures.ratio_figure(counts.ratio_histogram(updates), BOUNDS))
    assert "About 25 % lie outside the bounds." in said and "bounds 0.8 and 1.2" in said and "epoch 1" in said
    assert sum(count(chart, f"heat{k}") for k in range(1, 10)) == 3
    assert "no clip bounds" in drawn(figures.ratio_figure(counts.ratio_histogram(updates), None))[1]
    flags = pd.DataFrame([{"iteration": i, **dict.fromkeys(counts.FLAGS, 0), "token_updates": 100} for i in range(2)])
    flags["clip_high"], flags["wrong_low"] = [10, 20], [0, 5]
    chart, said = drawn(figures.flag_figure(flags))
    assert "Of 200 token updates the clip removed the gradient of 15 %; 2.5 % were outside" in said
    assert count(chart, "area") == 2, "flags that never occur have no layer"
    grid = counts.histogram_2d(np.array([1.0]), np.array([1.5]), counts.ADVANTAGE_EDGES, counts.RATIO_EDGES)
    assert [count(drawn(figures.quadrant_figure(grid, b))[0], "shade") for b in (BOUNDS, None)] == [2, 0]
    extremes = pd.DataFrame({"iteration": [0, 1], "min_ratio": [0.5, 0.1], "max_ratio": [1.5, 7.25]})
    assert "Largest ratio of all: 7.25." in drawn(figures.extremes_figure(extremes, BOUNDS))[1]
