"""The counts behind the figures: by hand, against slow definitions, and against the records of training."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from analysis.report.figures import counts, curves
from analysis.report.reading.load import iterations_of, token_rows
from analysis.report.tokens.responses import REASONS, response_summary, select, token_data
from ppo_repro.errors import UserError
from ppo_repro.records import reader

ANY_FLOAT = st.one_of(st.floats(-50, 50), st.just(math.nan), st.just(math.inf), st.just(-math.inf))
VALUES = arrays.arrays(np.float64, st.integers(0, 60), elements=ANY_FLOAT)


def slow_bin(value: float, edges: np.ndarray) -> int:
    """The bin [lo, hi) of one value; the outer bins reach to infinity."""
    for k in range(len(edges) - 1):
        if value < edges[k + 1]:
            return k
    return len(edges) - 2


@given(VALUES)
def test_histograms_are_what_their_definition_says(values: np.ndarray) -> None:
    found = counts.histogram(values, counts.LOG_RATIO_EDGES)
    slow = np.zeros(len(counts.LOG_RATIO_EDGES) - 1, dtype=np.int64)
    for value in values:
        if math.isfinite(value):
            slow[slow_bin(value, counts.LOG_RATIO_EDGES)] += 1
    assert (found == slow).all() and found.sum() == np.isfinite(values).sum()


@given(VALUES, st.integers(0, 60))
def test_histograms_of_parts_add_up(values: np.ndarray, cut: int) -> None:
    parts = [counts.histogram(part, counts.DELTA_EDGES) for part in (values[:cut], values[cut:])]
    assert (parts[0] + parts[1] == counts.histogram(values, counts.DELTA_EDGES)).all()


def test_two_dimensions_by_hand() -> None:
    edges = np.array([0.0, 1.0, 2.0])
    x, y = np.array([0.5, 0.5, 1.5, 9.0, math.nan]), np.array([0.5, 1.5, 0.2, -3.0, 0.5])
    assert counts.histogram_2d(x, y, edges, edges).tolist() == [[1, 1], [2, 0]]


def updates_frame(ratios: list[float], epochs: list[int], flags: list[str | None]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "epoch": np.array(epochs, np.int32), "minibatch": np.int32(0),
            "ratios": np.array(ratios, np.float32), "clip_flag": flags,
        }
    )  # fmt: skip


def test_overshoot_flags_and_extremes_by_hand() -> None:
    updates = updates_frame(
        [1.0, 1.5, 0.5, 3.0, math.inf, math.nan], [0, 0, 0, 1, 1, 1], ["none"] * 4 + ["clip_high", None]
    )
    found = counts.overshoot_counts(updates, 0.75, 1.25)  # over: none, 0.25, 0.25; 1.75
    by_epoch = {epoch: rows.set_index("beyond")["count"] for epoch, rows in found.groupby("epoch")}
    assert by_epoch[0].loc[counts.OVERSHOOT_EDGES < 0.25].eq(2).all()
    assert by_epoch[0].loc[counts.OVERSHOOT_EDGES > 0.25].eq(0).all()
    assert by_epoch[1].loc[counts.OVERSHOOT_EDGES < 1.75].eq(1).all() and found["total"].tolist().count(3) == 49
    assert counts.flag_row(4, updates)["clip_high"] == 1 and counts.flag_row(4, updates)["token_updates"] == 5
    extremes = counts.extremes_row(4, updates)
    assert (extremes["min_ratio"], extremes["max_ratio"]) == (0.5, 3.0)
    # infinity is broken, null is none at all
    assert extremes["nonfinite_ratios"] == 1


def test_standard_errors_by_hand() -> None:
    assert curves.mean_and_error(np.array([1.0, 3.0])) == (2.0, 1.0)
    assert math.isnan(curves.mean_and_error(np.array([1.0]))[1])
    # three responses: sums 2, 2, 5 over 1, 2, 3 tokens; ratio 1.5, residuals 0.5, -1, 0.5
    ratio, error = curves.ratio_and_error(np.array([2.0, 2.0, 5.0]), np.array([1.0, 2.0, 3.0]))
    assert ratio == 1.5 and error == pytest.approx(math.sqrt(1.5 * 1.5) / 6)


@given(arrays.arrays(np.float64, st.integers(2, 30), elements=st.floats(-5, 5)))
def test_a_ratio_of_equal_clusters_is_a_mean(values: np.ndarray) -> None:
    expected = curves.mean_and_error(values)
    found = curves.ratio_and_error(values * 4.0, np.full(len(values), 4.0))
    # sums in another order
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_seeds_become_one_line_with_their_spread() -> None:
    def seed(value: float, iterations: list[int]) -> pd.DataFrame:
        return pd.DataFrame({"iteration": iterations, "metric": "score", "value": value, "low": 0.0, "high": 0.0})

    found = curves.over_seeds([seed(1.0, [0, 1]), seed(3.0, [0])]).set_index("iteration")
    assert found.loc[0, ["value", "low", "high", "seeds"]].tolist() == [2.0, 1.0, 3.0, 2]
    assert found.loc[1, "value"] == 1.0 and math.isnan(found.loc[1, "low"])


def test_curves_agree_with_what_training_recorded(deterministic_run: Path) -> None:
    iterations, steps = reader.read_iterations(deterministic_run), reader.read_steps(deterministic_run)
    rows = [
        row
        for item in iterations_of(deterministic_run, range(len(iterations)))
        for row in curves.sampled_rows(item.iteration, item.sequences, item.tokens)
    ]
    final = reader.open_manifest(deterministic_run).final
    after = float(final["eval_accuracy"])
    found = pd.concat([pd.DataFrame(rows), curves.recorded_rows(iterations, steps, final)])
    held_out = found[found["metric"] == "eval_accuracy"].sort_values("iteration")
    measured = iterations[iterations["eval_accuracy"].notna()]
    assert held_out["iteration"].tolist() == [*measured["iteration"], len(iterations)]
    assert held_out["value"].tolist() == [*measured["eval_accuracy"], after]
    recorded = {
        "score": "score_mean", "accuracy": "accuracy", "ref_kl_per_sequence": "ref_kl_per_sequence",
        "entropy": "entropy", "response_length": "response_length_mean", "explained_variance": "explained_variance",
    }  # fmt: skip
    for metric, column in recorded.items():
        values = found[found["metric"] == metric].sort_values("iteration")["value"].to_numpy()
        # training adds up exactly, pandas in some order: float64 rounding of a few hundred terms
        assert values == pytest.approx(iterations[column].to_numpy(), rel=1e-12), metric
    flags = pd.DataFrame(
        counts.flag_row(i.iteration, i.updates) for i in iterations_of(deterministic_run, range(len(iterations)))
    )
    weighted = (steps["clip_fraction"] * steps["tokens"]).groupby(steps["iteration"]).sum().to_numpy()
    assert flags[["clip_high", "clip_low", "clip_dual"]].sum(axis=1).to_numpy() == pytest.approx(weighted)
    assert (flags["token_updates"].to_numpy() == steps.groupby("iteration")["tokens"].sum().to_numpy()).all()


def test_grids_hold_every_token_and_the_diagonal_where_both_agree(deterministic_run: Path, native_run: Path) -> None:
    tokens = reader.read_tokens(deterministic_run)
    grid = counts.probability_grid(tokens)
    assert grid.sum() == np.trace(grid) == len(tokens) and not counts.deltas(tokens).any()
    native = reader.read_tokens(native_run)
    assert counts.deltas(native).any(), "the negative control has to differ somewhere"
    first = next(iterations_of(deterministic_run, range(1)))
    assert counts.ratio_histogram(first.updates)["count"].sum() == len(first.updates)
    advantages = first.tokens["advantages"].to_numpy(np.float64)[first.token_rows]
    assert counts.quadrant_grid(advantages, first.updates).sum() == len(first.updates)


def test_units_of_text_conserve_the_sums(deterministic_run: Path) -> None:
    first = next(iterations_of(deterministic_run, range(1)))
    row = counts.text_row(0, first.sequences, first.tokens)
    tokens = first.tokens
    assert row["tokens"] == row["tokens_first"] + row["tokens_continuation"] + row["tokens_special"] == len(tokens)
    whole = float(tokens["entropies"].astype(np.float64).sum())
    assert row["entropy_first"] + row["entropy_continuation"] + row["entropy_special"] == pytest.approx(
        whole, rel=1e-12
    )
    stopped = reader.read_sequences(deterministic_run, iterations=[0])["finish_reason"].eq("stop").sum()
    assert row["tokens_special"] >= stopped  # every end token, and any other special one
    assert row["characters"] == first.sequences["response"].map(len).sum()
    assert row["bytes"] == row["characters"], "the small run writes digits only"


def test_updates_find_their_tokens_in_any_order(deterministic_run: Path) -> None:
    first = next(iterations_of(deterministic_run, range(1)))
    shuffled = first.tokens.sample(frac=1.0, random_state=3).reset_index(drop=True)
    rows = token_rows(shuffled, first.updates, "here")
    keys = ["sequence", "position"]
    assert (shuffled.loc[rows, keys].to_numpy() == first.updates[keys].to_numpy()).all()
    with pytest.raises(UserError, match="here: the updates name tokens"):
        token_rows(first.tokens.iloc[1:], first.updates, "here")


def summary_frame(rows: list[tuple[int, int, int, float, float, int]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["iteration", "sequence", "tokens", "score", "max_abs_delta", "clipped"])


def test_the_selection_by_hand() -> None:
    rows = [(0, 0, 5, 0.0, 0.0, 0), (0, 1, 5, 0.5, 9.0, 0), (0, 2, 5, 0.0, 0.0, 7), (1, 0, 5, 1.0, 0.0, 0)]
    rows += [(1, 1, 5, -1.0, 0.0, 0), (1, 2, 5, 0.0, 0.0, 0)]
    found = select(summary_frame(rows), 6)
    why = {(r.iteration, r.sequence): r.why for r in found.itertuples()}
    assert "mismatch" in why[0, 1] and why[0, 2][0] == "clipped"
    assert why[1, 0][:2] == ["best", "last"] and "worst" in why[1, 1] and "first" in why[0, 0]
    assert found[["iteration", "sequence"]].values.tolist() == sorted(map(list, why))
    assert len(select(summary_frame(rows), 2)) == 2
    assert select(summary_frame(rows), 6, max_tokens=11)["tokens"].sum() == 10
    assert len(select(summary_frame(rows), 6, max_tokens=1)) == 1, "one is shown however long it is"


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 3))
def test_a_selection_has_the_number_asked_for(count: int, there: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = [(k // 7, k % 7, 3, float(generator.integers(0, 3)), float(generator.random()), 1) for k in range(there)]
    found = select(summary_frame(rows), count)
    assert len(found) == min(count, there) and not found.duplicated(["iteration", "sequence"]).any()
    assert all(why and set(why) <= set(REASONS) for why in found["why"])
    largest = summary_frame(rows)["max_abs_delta"].max()
    assert found["max_abs_delta"].max() == largest


def test_the_token_view_holds_what_the_records_hold(native_run: Path) -> None:
    count = len(reader.read_iterations(native_run))
    summary = pd.concat([response_summary(item) for item in iterations_of(native_run, range(count))], ignore_index=True)
    data = token_data(native_run, select(summary, 12))
    assert len(data["responses"]) == 12
    keys = [column["key"] for column in data["columns"]]
    assert {"delta", "ratio_0", "ratio_1", "flag_0", "flag_1", "values", "advantages", "ref_kl"} <= set(keys)
    tokens, updates = reader.read_tokens(native_run), reader.read_updates(native_run)
    for shown in data["responses"]:
        mine = tokens[(tokens["iteration"] == shown["iteration"]) & (tokens["sequence"] == shown["sequence"])]
        assert shown["ids"] == mine["token_id"].tolist()
        assert "".join(shown["texts"]) == shown["response"]
        assert shown["special"][-1] == (shown["finish"] == "stop")
        # six significant digits are promised
        assert shown["columns"]["entropies"] == pytest.approx(mine["entropies"].to_list(), rel=5e-6, abs=1e-30)
        second = updates[(updates["iteration"] == shown["iteration"]) & (updates["sequence"] == shown["sequence"])]
        second = second[second["epoch"] == 1].sort_values("position")
        assert shown["columns"]["ratio_1"] == pytest.approx(second["ratios"].to_list(), rel=5e-6)
        assert shown["columns"]["flag_1"] == second["clip_flag"].tolist()
