"""The tables of the studies E1 to E7: measures of a cell, comparisons by seed, and which tables are printed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.tokenization import measures
from experiments.tokenization.answers import Family, compared, paired, report, slopes
from experiments.tokenization.measures import MEASURES, of_run
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader

POINTS = {
    "e1_units": ["characters", "bpe-256", "words"],
    "e2_ppo": ["characters", "bpe-256", "words"],
    "e3_kl_unit": [f"{name}, {charge}" for name in ("characters", "words") for charge in ("last_sum", "last_mean")],
    "e4_credit": ["characters-0.95", "characters-0.9849", "words-0.95"],
    "e5_clip": ["characters, 0.1", "words, 0.1"],
    "e6_drift": ["characters, 1.5", "bpe-256, 1.5", "words, 1.5"],
    "e7_digits": ["words", "bpe", "bpe_single_digits"],
}


def cells(points: dict[str, dict[str, list[float]]]) -> pd.DataFrame:
    """Cells of seeds 0, 1, ... by point and measure."""
    rows = [
        {"point": point, "seed": seed, **{name: values[seed] for name, values in of.items()}}
        for point, of in points.items()
        for seed in range(len(next(iter(of.values()))))
    ]
    return pd.DataFrame(rows)


def made(points: list[str], rng: np.random.Generator) -> pd.DataFrame:
    return cells({point: {name: rng.uniform(1, 2, 5).tolist() for name in MEASURES} for point in points})


def test_a_ratio_by_hand() -> None:
    found = cells({"a": {"kl": [1.0, 1.0, 1.0]}, "b": {"kl": [math.e, math.e**2, math.e**3]}, "c": {"kl": [1.01] * 3}})
    table = compared(found, Family("", "kl", [("b", "a"), ("c", "a")], ratio=True))
    # logarithms 1, 2, 3: mean 2, standard error 1 / sqrt 3, t = 3.4641, 97.5 % point of 2 degrees of freedom 4.3027
    low, high = math.exp(2 - 4.30265 / math.sqrt(3)), math.exp(2 + 4.30265 / math.sqrt(3))
    assert table["kl, 95 %"][0] == f"{math.e**2:.2f} [{low:.2f}, {high:.2f}]"
    # without a spread there is no t-test, so Holm corrects one p only
    assert table["p, Holm"].tolist() == ["0.074", "nan"]
    # t = (2 - log 1.1) sqrt 3 = 3.2990, whose distribution function is 1/2 + t / (2 sqrt(2 + t^2)) = 0.9596
    assert table["p of within 10 %, Holm"].tolist() == ["0.960", "0.000"]


def test_the_slope_of_a_power_law_is_its_exponent() -> None:
    lengths = {"a": [4.0, 5.0], "b": [8.0, 6.0], "c": [16.0, 20.0]}
    found = cells({p: {"tokens": n, "kl_token": [3.0 / n[0], 2.0 / n[1] ** 2]} for p, n in lengths.items()})
    assert slopes(found, "tokens", "kl_token") == pytest.approx([-1.0, -2.0])


def test_what_cannot_be_compared_is_one_line() -> None:
    found = cells({"a": {"kl": [1.0, 2.0]}, "b": {"kl": [1.0]}, "c": {"kl": [0.0, 1.0]}})
    refusals = (("a", "b", "different seeds"), ("a", "c", "not positive"), ("a", "d", "point d: has no complete"))
    for a, b, said in refusals:
        with pytest.raises(UserError, match=said):
            paired(found, a, b, "kl", True)
    with pytest.raises(UserError, match="e4_credit: is compared with cells of e2_ppo"):
        list(report({"e4_credit": found}, ["e4_credit"]))


def test_every_study_has_its_tables() -> None:
    rng = np.random.default_rng(0)
    grids = {name: made(points, rng) for name, points in POINTS.items()}
    said = "\n\n".join(report(grids, list(grids)))
    assert [line[3:] for line in said.splitlines() if line.startswith("## ")] == list(POINTS)
    for number in range(1, 11):
        assert f"\nH{number}" in said
    for name, points in POINTS.items():
        for point in points:
            assert f"| {point} | 5 |" in said, (name, point)
    # the first family of E3 by hand
    e3 = grids["e3_kl_unit"].set_index(["point", "seed"])["kl"]
    gaps = np.log(e3["characters, last_mean"]) - np.log(e3["characters, last_sum"])
    assert f"| characters, last_mean / characters, last_sum | {math.exp(gaps.mean()):.2f} [" in said


def test_the_measures_are_those_of_the_records(native_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="has 3 iterations; the measures need at least 4"):
        of_run(native_run)
    monkeypatch.setattr(measures, "LAST", 1)
    found, rows = of_run(native_run), reader.read_iterations(native_run)
    assert set(found) == set(MEASURES) and manifest.load(native_run).final["eval_accuracy"] == found["accuracy"]
    assert found["gain"] == rows["score_mean"].iloc[2] - rows["score_mean"].iloc[0]
    tokens = reader.read_tokens(native_run, iterations=[2]).astype({"old_logprobs": float, "ref_logprobs": float})
    k1, last = tokens["old_logprobs"] - tokens["ref_logprobs"], rows.iloc[2]
    assert found["k1"] == pytest.approx(k1.sum() / last["sequences"])
    assert found["abs_ratio"] == pytest.approx(k1.abs().sum() / (last["ref_kl_per_sequence"] * last["sequences"]))
    assert 0 < found["abs_ratio_words"] <= found["abs_ratio"], "terms of a word cancel"
    x, y = rows["ref_kl_per_sequence"], rows["score_mean"] - rows["score_mean"][0]
    assert found["gain_per_nat"] == pytest.approx(float(np.linalg.lstsq(x.to_numpy()[:, None], y)[0][0]))
