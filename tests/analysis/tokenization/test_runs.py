"""The analysis of a run agrees with the records of training; the exact table of E0 holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.tokenization.summary import SUMMARY_COLUMNS
from analysis.tokenization.tables import iteration_tables, report, run_drift, run_summary
from analysis.tokenization.tokenizer import recorded_tokenizer
from experiments.tokenization import oracle
from ppo_repro.errors import UserError
from ppo_repro.records import reader

# training adds with one rounding, this in pairs: float64 sums of a few hundred numbers
CLOSE = 1e-12


def one(summary: pd.DataFrame, metric: str, unit: str, reduction: str) -> np.ndarray:
    chosen = (summary[["metric", "unit", "reduction"]] == [metric, unit, reduction]).all(axis=1)
    return summary[chosen]["value"].to_numpy()


@pytest.mark.parametrize("fixture", ["deterministic_run", "native_run"])
def test_the_units_agree_with_the_recorded_iterations(fixture: str, request: pytest.FixtureRequest) -> None:
    run_dir = request.getfixturevalue(fixture)
    summary = run_summary(run_dir, boundary="leading", cluster="prompt", iterations=None)
    assert list(summary) == ["iteration", *SUMMARY_COLUMNS]
    recorded = reader.read_iterations(run_dir)
    for metric, unit, reduction, column in (
        ("kl_exact", "token", "ratio_of_sums", "ref_kl_per_token"),
        ("kl_exact", "sequence", "seq_mean_token_sum", "ref_kl_per_sequence"),
        ("entropy", "token", "ratio_of_sums", "entropy"),
    ):
        found = one(summary, metric, unit, reduction)
        assert found == pytest.approx(recorded[column].to_numpy(), rel=CLOSE, abs=CLOSE)
    assert (one(summary, "kl_exact", "token", "ratio_of_sums")[1:] > 0).all()


def test_the_clip_band_agrees_with_the_recorded_steps(deterministic_run: Path) -> None:
    steps = reader.read_steps(deterministic_run)
    for iteration in (0, 2):
        found = iteration_tables(deterministic_run, iteration, boundary="leading", cluster="sequence").tok_clip
        assert found is not None
        part = steps[steps["iteration"] == iteration]
        clipped = (part["clip_fraction"] * part["tokens"]).groupby(part["epoch"]).sum()
        assert found["token_clipped"].tolist() == pytest.approx(
            (clipped / found["n_tok"].to_numpy()).tolist(), abs=CLOSE
        )
        # a clipped token is outside the band: float32 ratios may differ from float64 ones only at its very edge
        assert (found["token_out"] >= found["token_clipped"]).all()


def test_rewards_are_conserved_and_weights_are_the_runs(deterministic_run: Path) -> None:
    tables = iteration_tables(deterministic_run, 1, boundary="leading", cluster="sequence")
    sequences = reader.read_sequences(deterministic_run, iterations=[1])
    by_sequence = tables.tok_token.groupby("sequence")[["reward_kl", "reward_score"]].sum()
    # rewards were rounded to float32 after the penalty was taken
    assert by_sequence["reward_score"].tolist() == pytest.approx(sequences["scores"].tolist(), abs=1e-5)
    assert by_sequence["reward_kl"].tolist() == pytest.approx((-sequences["kl_penalty_sum"]).tolist(), abs=CLOSE)
    first = tables.tok_token[tables.tok_token["position"] == 0]["terminal_weight"]
    assert first.tolist() == pytest.approx((0.95 ** (sequences["response_length"] - 1)).tolist())
    assert tables.tok_word.groupby("sequence")["text"].agg("".join).tolist() == sequences["response"].tolist()


def test_the_recorded_tokenizer_spells_what_was_recorded(deterministic_run: Path) -> None:
    drift = run_drift(deterministic_run, recorded_tokenizer(deterministic_run), boundary="leading", iterations=None)
    assert len(drift) == 3 and drift["drift_seq_frac"].between(0, 1).all()
    lines = report(deterministic_run, None, "trailing", "prompt")
    assert "iteration 2, boundary trailing, nats, standard errors by prompt" in lines[0]
    assert any(line.startswith("merges_sha256") for line in lines)
    with pytest.raises(UserError, match="no iteration 3"):
        iteration_tables(deterministic_run, 3, boundary="leading", cluster="sequence")


@pytest.fixture(scope="module")
def rows() -> list[oracle.Row]:
    return oracle.table()


def test_sums_of_k1_k3_and_the_exact_divergence_do_not_depend_on_the_tokenizer(rows: list[oracle.Row]) -> None:
    *one_cut, all_cuts = rows
    kl = one_cut[0].string_kl
    assert kl > 1.0 and len({row.tokens for row in one_cut}) == 5
    for row in one_cut:
        for value in (row.string_kl, row.sum_k1, row.sum_k3, row.sum_exact):
            assert abs(value - kl) < oracle.TOLERANCE
        assert row.telescoping < oracle.TOLERANCE and abs(row.cut_kl) < oracle.TOLERANCE
    assert all_cuts.cut_kl > 0.1 and abs(all_cuts.sum_k1 - kl - all_cuts.cut_kl) < oracle.TOLERANCE
    assert oracle.broken(rows) == []


@pytest.mark.parametrize("name", ["sum_k2", "sum_abs_k1", "sum_clamped_k1", "token_mean", "mean_of_means"])
def test_the_other_estimators_depend_on_the_tokenizer(rows: list[oracle.Row], name: str) -> None:
    values = [getattr(row, name) for row in rows[:-1]]
    assert max(values) > 1.05 * min(values)


def test_a_broken_proposition_is_named(rows: list[oracle.Row]) -> None:
    wrong = [dataclasses.replace(rows[0], sum_k1=rows[0].sum_k1 + 1e-8), *rows[1:]]
    assert [line.partition(" = ")[0] for line in oracle.broken(wrong)] == ["characters: sum k1"]
    same = [dataclasses.replace(row, sum_k2=5.0) for row in rows]
    assert oracle.broken(same) == ["sum_k2 is the same for all tokenizers, which is not expected"]


def test_summing_over_all_cuts_gives_the_string(rows: list[oracle.Row]) -> None:
    worst, gap = oracle.marginal_gap()
    assert worst < oracle.TOLERANCE and gap >= 0.0


@pytest.mark.slow
def test_the_table_is_deterministic(rows: list[oracle.Row]) -> None:
    assert oracle.table() == rows
