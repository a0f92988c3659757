"""The mismatch lab: its task by hand, its grids, and the tables of its answers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from experiments.mismatch_lab import topics
from experiments.mismatch_lab.answers import MEASURES, of_run
from ppo_repro.records import reader


def test_the_reward_by_hand() -> None:
    perfect = "abc" * 8
    assert topics.score("ca:", perfect, "") == 1.0
    assert topics.score("ca:", "abab", "") == 4 / 24
    assert topics.score("ca:", "aabb", "") == 2 / 24, "a letter twice in a row counts once"
    assert topics.score("ca:", "adbe", "") == 2 / 24, "letters of another topic"
    assert topics.score("ca:", perfect + "ab", "") == 22 / 24, "letters beyond the 24th are taken off"
    assert topics.score("ca:", "", "") == topics.score("ca:", "d" * 60, "") == 0.0


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
