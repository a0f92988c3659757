"""The analysis of a run agrees with the records of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis.tokenization.recorded_tokenizer import recorded_tokenizer
from ppo_repro.analysis.tokenization.tables import drift_by_iteration, iteration_tables, summary_by_iteration
from ppo_repro.analysis.tokenization.token_kl import SummaryRow
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from tests.support.cli import Cli

# training adds with one rounding, this in pairs: float64 sums of a few hundred numbers
CLOSE = 1e-12


def one(summary: pd.DataFrame, metric: str, unit: str, reduction: str) -> np.ndarray:
    chosen = (summary[["metric", "unit", "reduction"]] == [metric, unit, reduction]).all(axis=1)
    return summary[chosen]["value"].to_numpy()


def test_the_units_agree_with_the_recorded_iterations(native_run: Path) -> None:
    summary = summary_by_iteration(native_run, boundary="leading", iterations=None)
    assert list(summary) == ["iteration", *SummaryRow._fields]
    recorded = reader.read_iterations(native_run)
    for metric, unit, reduction, column in (
        ("ref_kl", "token", "ratio_of_sums", "ref_kl_per_token"),
        ("ref_kl", "sequence", "seq_mean_token_sum", "ref_kl_per_sequence"),
        ("entropy", "token", "ratio_of_sums", "entropy"),
    ):
        found = one(summary, metric, unit, reduction)
        assert found == pytest.approx(recorded[column].to_numpy(), rel=CLOSE, abs=CLOSE)
    assert (one(summary, "ref_kl", "token", "ratio_of_sums")[1:] > 0).all()


def test_the_clip_band_agrees_with_the_recorded_steps(deterministic_run: Path) -> None:
    steps = reader.read_steps(deterministic_run)
    for iteration in (0, 2):
        found = iteration_tables(deterministic_run, iteration, boundary="leading").clip_band
        assert found is not None
        part = steps[steps["iteration"] == iteration]
        clipped = (part["clip_fraction"] * part["tokens"]).groupby(part["epoch"]).sum()
        assert found["removed"].tolist() == pytest.approx((clipped / found["n_tokens"].to_numpy()).tolist(), abs=CLOSE)
        # a clipped token is outside the band: float32 ratios may differ from float64 ones only at its very edge
        assert (found["outside"] >= found["removed"]).all()


def test_the_recorded_tokenizer_spells_what_was_recorded(deterministic_run: Path, cli: Cli) -> None:
    drift = drift_by_iteration(deterministic_run, recorded_tokenizer(deterministic_run))
    assert len(drift) == 3
    assert drift["frac_drifted"].between(0, 1).all()
    lines = cli.done("analyse", "tokenization", deterministic_run, "--boundary", "trailing").splitlines()
    assert "iteration 2, boundary trailing, nats, standard errors by response" in lines[0]
    with pytest.raises(UserError, match="no iteration 3"):
        iteration_tables(deterministic_run, 3, boundary="leading")
    with pytest.raises(UserError, match="names no iteration"):
        summary_by_iteration(deterministic_run, boundary="leading", iterations=[])
