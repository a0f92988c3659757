"""The tables of the studies E1 to E7: measures of a cell, comparisons by seed, and which tables are printed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.tokenization import measures
from experiments.tokenization.answers import Family, compared
from experiments.tokenization.measures import MEASURES, of_run
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader


def cells(points: dict[str, dict[str, list[float]]]) -> pd.DataFrame:
    """Cells of seeds 0, 1, ... by point and measure."""
    rows = [
        {"point": point, "seed": seed, **{name: values[seed] for name, values in of.items()}}
        for point, of in points.items()
        for seed in range(len(next(iter(of.values()))))
    ]
    return pd.DataFrame(rows)


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
