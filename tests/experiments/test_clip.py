"""The study of the clipped share: its rank correlation by hand, and its committed figure."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from experiments.clip.across import across_figure, rank_correlation
from ppo_repro.analysis.figures import svg
from tests.support.paths import ROOT

STUDY = ROOT / "experiments" / "clip"


def test_the_rank_correlation_is_of_the_settings_and_its_interval_of_the_seeds() -> None:
    rows = {"x": (0.5, [0.1, 0.3]), "y": (0.2, [0.2, 0.2]), "z": (0.1, [0.9, 0.7])}
    runs = [
        {"setting": setting, "seed": seed, "share": share, "accuracy": accuracy, "equal": 0.0}
        for setting, (share, of_seeds) in rows.items()
        for seed, accuracy in enumerate(of_seeds)
    ]
    results = pd.DataFrame(runs)
    # means 0.2, 0.2, 0.8 have ranks 1.5, 1.5, 3, the shares 3, 2, 1: Spearman's correlation is -sqrt(3) / 2
    rank = rank_correlation(results, "share", "accuracy")
    assert rank.value == pytest.approx(-math.sqrt(3) / 2)
    # one seed alone: ranks 1, 2, 3 give -1; the other alone: 2, 1, 3 give -0.5
    assert (rank.low, rank.high) == (pytest.approx(-1.0), pytest.approx(-0.5))
    # seed 0 of x, y, z and seed 1 of z, y, x
    assert rank_correlation(results.iloc[[0, 2, 4, 5, 3, 1]], "share", "accuracy") == rank


def test_the_committed_figure_and_page_follow_from_the_results() -> None:
    results = pd.read_csv(STUDY / "results.csv")
    rank = rank_correlation(results, "clip_fraction", "mean_accuracy")
    assert f"rank correlation {rank.value:.1f}.**" in (STUDY / "README.md").read_text(encoding="utf-8")
    drawn = svg(across_figure(results, "clip_fraction", "mean_accuracy"))
    assert drawn == (STUDY / "answer.svg").read_text(encoding="utf-8")
