"""Two recorded runs: the same run, exact against native, changed copies, wrong input."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis.comparison.compare import compare_runs
from ppo_repro.analysis.comparison.findings import findings_table
from ppo_repro.analysis.comparison.same_prompts import hazard, numeric_findings, paired_responses
from ppo_repro.base.errors import UserError
from ppo_repro.records import diff, reader
from tests.support.cli import Cli
from tests.support.statistics import rng


@pytest.fixture(scope="module")
def both(deterministic_run: Path, native_run: Path) -> pd.DataFrame:
    return compare_runs(deterministic_run, native_run, rng())


def row(table: pd.DataFrame, level: str, metric: str, method: str = "") -> pd.Series:
    chosen = table[(table["level"] == level) & (table["metric"] == metric)]
    (found,) = chosen[chosen["method"].str.contains(method, regex=False)].to_dict("records")
    return pd.Series(found)


def test_a_run_is_the_same_as_itself(deterministic_run: Path) -> None:
    table = compare_runs(deterministic_run, deterministic_run, rng())
    assert (table[table["level"] == "bitwise"]["verdict"] == "identical").all()
    assert (table[table["level"] == "bitwise"]["stat"] == 1.0).all()
    tests = table[table["p_value"].notna()]
    assert set(tests["verdict"]) == {"equivalent", "no difference found"}
    assert (tests[tests["verdict"] != "equivalent"]["p_value"] == 1.0).all()
    assert row(table, "numeric", "same_responses")["stat"] == 1.0
    assert row(table, "numeric", "old_logprobs.bitwise")["stat"] == 1.0
    assert row(table, "numeric", "divergence_hazard")["stat"] == 0.0
    assert (table[table["metric"].str.contains("delta")]["stat"] == 0.0).all()


def test_exact_against_native(both: pd.DataFrame, deterministic_run: Path, native_run: Path) -> None:
    # native numerics train another model before the first iteration
    first = diff.first_difference(deterministic_run, native_run)
    assert first is not None
    assert first.iteration == diff.BEFORE
    assert first.table == "warm_start_steps"
    assert row(both, "bitwise", "fingerprint")["verdict"] == f"different: {first.describe()}"
    assert row(both, "numeric", "old_logprobs.bitwise")["stat"] < 1.0
    scores = [reader.read_sequences(run)["scores"].mean() for run in (deterministic_run, native_run)]
    assert row(both, "distribution", "scores")["stat"] == pytest.approx(scores[1] - scores[0])
    absolute = row(both, "numeric", "old_logprobs.abs_delta", "TOST")
    assert absolute["stat"] > 0
    assert absolute["margin"] == 1e-3
    low, high = absolute["ci_lo"], absolute["ci_hi"]
    assert (absolute["verdict"] == "equivalent") == (high < 1e-3)
    assert low <= absolute["stat"] <= high
    first = row(both, "outcome", "final.eval_accuracy")
    finals = [reader.open_manifest(run).final["eval_accuracy"] for run in (deterministic_run, native_run)]
    assert (first["stat"], first["verdict"]) == (float(finals[1]) - float(finals[0]), "one seed")


def test_the_printed_comparison_fits_a_terminal_and_keeps_every_word(
    both: pd.DataFrame, deterministic_run: Path, native_run: Path, cli: Cli
) -> None:
    out = cli.done("analyse", "compare", deterministic_run, native_run)
    lines = out.splitlines()[2:]  # without the names of the runs
    assert max(map(len, lines)) <= 110
    words = " ".join(out.split())
    assert [text for text in [*both["verdict"], *both["method"]] if text not in words] == []
    (scores,) = (line.split() for line in lines if line.strip().startswith("scores "))
    assert f"{row(both, 'distribution', 'scores')['stat']:.4g}" in scores


def test_paired_responses_by_definition(deterministic_run: Path, parted_run: Path) -> None:
    found = paired_responses(deterministic_run, parted_run)
    assert 0.05 < found["diverged"].mean() < 0.95
    found = found.set_index(["iteration", "sequence"])
    runs = [
        (reader.read_sequences(run), dict(list(reader.read_tokens(run).groupby(["iteration", "sequence"]))))
        for run in (deterministic_run, parted_run)
    ]
    assert len(found) == len(runs[0][0]) == len(runs[1][0])
    for key, ids_a, ids_b in zip(
        zip(runs[0][0]["iteration"], runs[0][0]["sequence"], strict=True),
        *(sequences["response_ids"].map(list) for sequences, _ in runs),
        strict=True,
    ):
        common = next((i for i, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y), None)
        assert found.loc[key, "diverged"] == (ids_a != ids_b)
        assert found.loc[key, "compared"] == (len(ids_a) if ids_a == ids_b else (common or 0) + 1)
        logs = [tokens[key]["old_logprobs"].to_numpy() for _, tokens in runs]
        if ids_a == ids_b:
            deltas = [float(y) - float(x) for x, y in zip(*logs, strict=True)]
            assert found.loc[key, "delta_sum"] == pytest.approx(sum(deltas), abs=1e-15)
            assert found.loc[key, "abs_sum"] == pytest.approx(sum(map(abs, deltas)))
            assert found.loc[key, "unequal"] == sum(x.tobytes() != y.tobytes() for x, y in zip(*logs, strict=True))
        else:
            assert math.isnan(found.loc[key, "abs_sum"])


def responses(delta_sums: list[float], iterations: list[int] | None = None) -> pd.DataFrame:
    n = len(delta_sums)
    return pd.DataFrame(
        {
            "iteration": iterations or [0] * n,
            "sequence": range(n),
            "compared": [2] * n,
            "diverged": [False] * n,
            "delta_sum": delta_sums,
            "abs_sum": np.abs(delta_sums),
            "unequal": [1] * n,
        }
    )


def numeric(frame: pd.DataFrame, margin: float = 1.0) -> pd.DataFrame:
    findings = numeric_findings(frame, rng(), column="old_logprobs", margin=margin, alpha=0.05)
    return findings_table("a", "b", {"numeric": findings}, 0.05)


def test_numeric_findings_by_hand() -> None:
    # deltas of responses of two tokens: 1, 2, 3 nats; of eight sign changes two reach the mean
    table = numeric(responses([2.0, 4.0, 6.0]))
    flip = row(table, "numeric", "old_logprobs.delta", "sign changes (all)")
    assert (flip["stat"], flip["p_value"], flip["p_holm"], flip["n_units"]) == (2.0, 0.25, 0.25, 3)
    # mean 2, se 1 / sqrt 3: far outside a margin of 1, well inside one of 9
    assert row(table, "numeric", "old_logprobs.abs_delta", "TOST")["verdict"] == "not shown"
    assert row(numeric(responses([2.0, 4.0, 6.0]), 9.0), "numeric", "old_logprobs.abs_delta", "TOST")["p_value"] < 0.05
    # what is not finite is counted and left out
    table = numeric(responses([2.0, math.inf, math.nan, 4.0, 6.0]))
    assert row(table, "numeric", "n_nonfinite")["stat"] == 2.0
    assert row(table, "numeric", "old_logprobs.delta", "sign changes")["stat"] == 2.0
    # without a response in common only shares are left
    parted = responses([1.0]).assign(diverged=True, delta_sum=math.nan, abs_sum=math.nan)
    assert set(numeric(parted)["metric"]) == {"same_responses", "n_nonfinite", "divergence_hazard"}


def test_the_hazard_by_hand() -> None:
    # one event in five tokens: exp(-m) = 0.975, and (1 + m) exp(-m) = 0.025 at m = 5.5716
    found = hazard(np.array([2, 3]), np.array([True, False]))
    assert found == pytest.approx((0.2, -math.log(0.975) / 5, 5.5716434 / 5))
    assert hazard(np.array([4]), np.array([False]))[:2] == (0.0, 0.0)


def test_a_grid_is_refused(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "grid.yaml").touch()
    for words in (["--axis", "x", "--a", "p", "--b", "q"], []):
        refused = cli.refusal("analyse", "compare", tmp_path, *words)
        assert "is a grid; `ppo-repro analyse table GRID --against SETTING` compares its settings" in refused


def test_wrong_input(deterministic_run: Path, tmp_path: Path) -> None:
    for change, said in (
        ({"margin": 0.0}, "margin is positive"),
        ({"alpha": 0.5}, "alpha between 0 and 0.5"),
        ({"column": "values"}, "must be old_logprobs, rollout_logprobs, ref_logprobs"),
        ({"iterations": []}, "names no iteration"),
        ({"iterations": [9]}, "no iteration 9"),
    ):
        with pytest.raises(UserError, match=said):
            compare_runs(deterministic_run, deterministic_run, rng(), **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no such folder"):
        compare_runs(deterministic_run, tmp_path / "none", rng())
