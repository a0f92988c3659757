"""The mismatch lab: its task by hand, its grids, and the tables of its answers."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from experiments.mismatch_lab import topics
from experiments.mismatch_lab.answers import MEASURES, RATE, of_run, rows
from ppo_repro.records import reader


def test_the_reward_by_hand() -> None:
    perfect = "abc" * 8
    assert topics.score("ca:", perfect, "") == 1.0
    assert topics.score("ca:", "abab", "") == 4 / 24
    assert topics.score("ca:", "aabb", "") == 2 / 24, "a letter twice in a row counts once"
    assert topics.score("ca:", "adbe", "") == 2 / 24, "letters of another topic"
    assert topics.score("ca:", perfect + "ab", "") == 22 / 24, "letters beyond the 24th are taken off"
    assert topics.score("ca:", "", "") == topics.score("ca:", "d" * 60, "") == 0.0


def cells_of(values: dict[str, list[float]], rate: str = "1") -> pd.DataFrame:
    """Cells with these scores of seeds 1, 2, ..; every other measure is 0, and no routes."""
    made = []
    for point, numbers in values.items():
        for seed, score in enumerate(numbers, start=1):
            other = dict.fromkeys(MEASURES, 0.0) | dict.fromkeys(
                ("flipped", "flip_rms", "same_rms", "flip_k3"), math.nan
            )
            made.append({"point": point, RATE: rate, "seed": seed, **other, "first": 0.2, "score": score})
    return pd.DataFrame(made)


def test_a_run_collapsed_if_it_ends_below_its_beginning() -> None:
    table = rows(cells_of({"a": [0.1, 0.3, 0.19]})).set_index("point")
    assert table.loc["a", "collapsed"] == "2 of 3" and "flipped" not in table
    held_out = cells_of({"a": [0.0, 0.0, 0.0]}).assign(greedy=[0.1 + 0.2, 0.2, 0.4], greedy_first=[0.3, 0.3, 0.3])
    held_out.loc[0, ["greedy", "greedy_first"]] = 0.3, 0.1 + 0.2  # one number, with other last bits
    assert rows(held_out).set_index("point").loc["a", "greedy collapsed"] == "1 of 3"


def test_the_measures_are_those_of_the_records(deterministic_run: Path, native_run: Path) -> None:
    own, native = of_run(deterministic_run), of_run(native_run)
    assert set(own) == set(MEASURES)
    assert own["k3"] == 0.0 < native["k3"] < 1e-10, "native numerics differ in the last bits"
    recorded = reader.read_iterations(deterministic_run)
    assert own["score"] == pytest.approx(recorded["score_mean"].tail(3).mean())
    assert own["first"] == recorded["score_mean"].iloc[0]
    evaluations = reader.read_evaluations(deterministic_run)
    last = evaluations[evaluations["iteration"] == len(recorded)]["scores"]
    assert own["greedy"] == pytest.approx(last.sum() / len(last)) and len(last) > 1
    assert math.isnan(own["flipped"]), "a dense model has no routes"
