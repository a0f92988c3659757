"""The counts behind the figures, by hand and against the records of training; the figures, from small frames."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis.clip_flags import DRAWN
from ppo_repro.analysis.html import charts
from ppo_repro.analysis.html.page import Figure, figure_html
from ppo_repro.analysis.report.data.chosen_responses import choose_responses
from ppo_repro.analysis.report.data.metrics import CONTENT
from ppo_repro.analysis.report.data.page_numbers import delta_counts, ratio_quantiles, read_page_numbers
from ppo_repro.analysis.report.data.run_curves import Curve, curves_of, over_seeds
from ppo_repro.analysis.report.data.run_facts import read_facts
from ppo_repro.analysis.report.data.token_view import read_token_view
from ppo_repro.analysis.report.sections import curve_figures
from ppo_repro.analysis.report.sections.ratios_and_clipping import (
    extreme_ratios,
    extremes_figure,
    flag_figure,
    ratio_figure,
    ratios_by_step,
)
from ppo_repro.analysis.report.sections.sampler_and_trainer import bucket_figure
from ppo_repro.analysis.report.sections.verdicts import on_purpose
from ppo_repro.records import reader
from tests.support.runs import small_config

BOUNDS = [charts.Rule(0.8, "bounds 0.8 and 1.2"), charts.Rule(1.2)]


def test_differences_and_ratios_are_counted_by_hand() -> None:
    counted = delta_counts(np.array([3e-9, -3e-9, -3e-9, 50.0, 1e-12, 0.0, math.nan, math.inf, -math.inf]))
    assert counted.sum(axis=1).tolist() == [3, 2], "neither 0 nor what is not finite"
    assert counted[0, 0] == counted[0, -1] == 1, "what lies beyond is in the outer bins"
    ratios = np.array([1.0, 1.5, 0.5, 3.0, math.inf, math.nan], np.float32)
    row = ratio_quantiles(4, pd.DataFrame({"epoch": 0, "minibatch": 0, "ratios": ratios})).iloc[0]
    assert (row["iteration"], row["smallest"], row["median"], row["largest"]) == (4, 0.5, 1.25, 3.0)


def curve(values: list[float]) -> Curve:
    """A curve without a band."""
    return Curve(np.arange(len(values)), np.array(values), *np.full((2, len(values)), math.nan))


def test_intervals_over_seeds_by_hand() -> None:
    def mean(values: list[float], score: tuple[float, float]) -> list[float]:
        seeds = [{"score_mean": curve([value])} for value in values]
        return over_seeds(seeds, CONTENT["language"].learning, score)["score_mean"].table.iloc[0].tolist()

    few = mean([1.0, 3.0, math.nan], (0.0, 9.0))
    assert few == [0, 2.0, 1.0, 3.0, 2], "below five seeds the smallest and the largest"
    # standard error sqrt(0.2), t of 4 degrees of freedom at 97.5 % 2.776: 3 -+ 1.242
    many = mean([2.0, 2.0, 3.0, 4.0, 4.0], (-math.inf, math.inf))
    assert many[1:4] == pytest.approx([3, 1.758, 4.242], abs=1e-3)
    inside = mean([2.0, 2.0, 3.0, 4.0, 4.0], (2.0, 4.0))
    assert inside[2:4] == [2.0, 4.0], "a band is inside the possible range"
    lost = mean([1.0, 3.0, math.nan, math.nan, math.nan], (0.0, 9.0))
    assert lost == few, "seeds without a value do not count"


def test_a_setting_has_one_colour_on_every_panel_also_where_another_has_no_curve() -> None:
    both = {"score_mean": curve([0.5, 0.5]), "entropy": curve([0.5, 0.5])}
    drawn = [
        curve_figures.PageLine("first", {"score_mean": both["score_mean"]}),
        curve_figures.PageLine("second", both, (both, both)),
    ]
    wanted = [metric for metric in CONTENT["language"].learning if metric.key in ("score_mean", "entropy")]
    score, entropy = (figure.chart for figure in curve_figures.metric_figures(wanted, drawn))
    assert 'class="line stroke0"' in score
    assert 'class="line stroke1"' in score
    assert 'class="line stroke1"' in entropy
    assert "stroke0" not in entropy
    assert score.count('class="part stroke1"') == 2, "each seed is a thin line"
    assert "first" not in score.partition("data-hover")[2].partition(">")[2], "the section has the names"
    entries = charts.legend(["first", "<b>"])
    assert entries.count("<li>") == 2
    assert 'stroke1"' in entries
    assert "&lt;b&gt;" in entries
    assert charts.legend(["alone"]) == ""


def test_lines_that_hide_each_other_are_named_below_their_chart() -> None:
    values = {"a": [0.5, 0.6], "b": [0.5, 0.7], "c": [0.5, 0.6]}
    drawn = [curve_figures.PageLine(name, {"score_mean": curve(of)}) for name, of in values.items()]
    wanted = [metric for metric in CONTENT["language"].learning if metric.key == "score_mean"]
    (figure,) = curve_figures.metric_figures(wanted, drawn)
    assert figure.caption.endswith("the same line: `a` and `c`.")
    (figure,) = curve_figures.metric_figures(wanted, drawn[:2])
    assert "the same line" not in figure.caption


@pytest.mark.parametrize(
    ("column", "title"),
    [("clip_range", "Clip range"), ("kl_coef", "KL coefficient"), ("penalty_coef", "Penalty coefficient")],
)
def test_a_coefficient_has_a_figure_if_it_changes_over_a_run(deterministic_run: Path, column: str, title: str) -> None:
    facts = read_facts(deterministic_run)

    def has_figure(*runs: list[float]) -> bool:
        tables = [facts.iterations.assign(**{column: values}) for values in runs]
        lines = [curve_figures.PageLine("", curves_of(replace(facts, iterations=table), {})) for table in tables]
        return title in {
            figure.title for figure in curve_figures.metric_figures(CONTENT["language"].optimisation, lines)
        }

    assert has_figure([0.2, 0.2, 0.4])
    assert has_figure([0.2, 0.2, 0.2], [0.2, 0.2, 0.4])
    assert not has_figure([0.2, 0.2, 0.2], [0.4, 0.4, 0.4]), "the configuration has a constant"


def test_a_scan_agrees_with_what_training_recorded(deterministic_run: Path) -> None:
    facts = read_facts(deterministic_run)
    iterations, steps, scan = facts.iterations, facts.steps, read_page_numbers(facts)
    held_out = scan.curves["eval_accuracy"]
    measured = iterations[iterations["eval_accuracy"].notna()]
    assert held_out.iteration.tolist() == [*measured["iteration"], len(iterations)]
    assert held_out.value.tolist() == [*measured["eval_accuracy"], float(facts.manifest.final["eval_accuracy"])]
    recorded = [metric.key for metric in CONTENT["language"].learning if metric.source == "samples"]
    assert recorded
    for column in recorded:
        # training adds up exactly, pandas in some order: float64 rounding of a few hundred terms
        assert scan.curves[column].value == pytest.approx(iterations[column].to_numpy(), rel=1e-12), column
    weighted = (steps["clip_fraction"] * steps["tokens"]).groupby(steps["iteration"]).sum().to_numpy()
    assert scan.flags[["clip_high", "clip_low", "clip_dual"]].sum(axis=1).to_numpy() == pytest.approx(weighted)
    visits = int(steps["tokens"].sum())
    assert scan.flags["token_updates"].sum() == visits
    assert scan.counts.deltas.sum() == 0
    updates = reader.read_updates(deterministic_run)
    assert scan.ratios["largest"].max() == updates["ratios"].max()
    assert scan.ratios["smallest"].min() == updates["ratios"].min()


def test_the_token_view_has_what_the_records_have(native_run: Path) -> None:
    facts = read_facts(native_run)
    chosen = choose_responses(read_page_numbers(facts).responses, 12)
    data = read_token_view(facts.tables, chosen)
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
        assert shown["ids"] == mine["token_id"].tolist()
        assert "".join(shown["texts"]) == shown["response"]
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
        {"epoch": [0, 0, 1, 1], "minibatch": 0, "ratios": np.array([1.0, 1.0, 1.0, 7.25], np.float32)}
    )
    ratios = ratio_quantiles(0, updates)
    within = drawn(ratio_figure(ratios_by_step(ratios), BOUNDS))
    extremes = drawn(extremes_figure(extreme_ratios(ratios), BOUNDS))
    assert "bounds 0.8 and 1.2" in within[1]
    assert "the median ratio is 4.125" in within[1]
    assert "Largest ratio of all: 7.25." in extremes[1], "two, and the legend's"
    assert count(extremes[0], "rule") == 3, "two, and the legend's"
    counts = {**dict.fromkeys(DRAWN, 0), "token_updates": 100}
    flags = pd.DataFrame([{"iteration": i, **counts} for i in range(2)])
    flags["clip_high"], flags["wrong_low"] = [10, 20], [0, 5]
    chart, said = drawn(flag_figure(flags))
    assert "Of 200 token updates the clip removed the gradient of 15 %; 2.5 % were outside" in said
    assert count(chart, "line") == 2, "flags that never occur have no line"
    flags = pd.DataFrame([{"iteration": 0, **counts, "bound_high": 30, "bound_low": 10}])
    bounded = drawn(flag_figure(flags))[1]
    assert "Of 100 token updates 40 % had a bounded weight and kept their gradient." in bounded
    assert "weight bounded below" in bounded
    assert "outside the band" not in bounded, "CISPO has no band"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("mismatch.sampler.stock=bfloat16", "mismatch.sampler.stock = bfloat16."),
        ("mismatch.sampler.precision={weights: bfloat16}", "mismatch.sampler.precision = weights bfloat16."),
        ("mismatch.sampler.lag=1", "mismatch.sampler.lag = 1."),
        ("mismatch.trainer.eos_in_loss=false", "mismatch.trainer.eos_in_loss = false."),
        ("mismatch.flip=token", "mismatch.flip = token."),
        ("rollout.mismatch_sigma=0.5", "rollout.mismatch_sigma = 0.5."),
    ],
)
def test_each_deliberate_cause_of_mismatch_is_named_once(fault: str, said: str) -> None:
    (verdict,) = on_purpose(small_config(fault))
    assert verdict.text.endswith(f"on purpose: {said}")
    assert on_purpose(small_config()) == []


def test_a_bucket_is_named_by_its_own_ends() -> None:
    """Between the two buckets lies an empty one."""
    rows = [("prob", 0.01, 0.1, 5), ("prob", 0.9, 1.0, 5)]
    buckets = pd.DataFrame(rows, columns=["kind", "lo", "hi", "n_tokens"]).assign(
        abs_mean=0.1, abs_p99=0.2, abs_max=0.3
    )
    chart = bucket_figure(buckets, "prob").chart
    assert "0.01 to 0.1" in chart
    assert "0.01 to 0.9" not in chart
