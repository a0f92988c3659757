"""Pairs from runs are complete, in one shape, and have the recorded bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ppo_repro.analysis.agreement import run_agreement
from ppo_repro.analysis.grid_outcomes import measures_of
from ppo_repro.analysis.report.run_page import run_page
from ppo_repro.analysis.run_pairs import run_pairs
from ppo_repro.analysis.tokenization.tables import summary_by_iteration
from ppo_repro.analysis.visits import load_iterations
from ppo_repro.records import manifest, reader
from ppo_repro.records.logprob_pairs import OPTIONAL, PAIR, TOKEN_KEY
from ppo_repro.testing.pairs import evidence_of
from tests.support.synthetic_run import bits


def joined(chunks: Any) -> pd.DataFrame:
    return pd.concat(list(chunks), ignore_index=True)


def test_the_pairs_of_a_run_are_the_recorded_bits(native_run: Path) -> None:
    chunks = list(run_pairs(native_run))
    assert [chunk["iteration"].unique().tolist() for chunk in chunks] == [[0], [1], [2]]
    found, tokens = joined(chunks), reader.read_tokens(native_run)
    assert set(found) == {*PAIR, *OPTIONAL}, "a run without lags, turns and routes has no such column"
    names = {"logprobs_a": "rollout_logprobs", "logprobs_b": "old_logprobs"}
    for name in found:
        assert bits(found[name].to_numpy()) == bits(tokens[names.get(name, name)].to_numpy())


def test_the_first_new_log_probs_of_a_run(native_run: Path) -> None:
    found = joined(run_pairs(native_run, "old_vs_first_new", iterations=[1, 2])).set_index(TOKEN_KEY)
    updates = reader.read_updates(native_run, iterations=[1, 2])
    first = updates[updates["epoch"] == 0].set_index(TOKEN_KEY)
    assert len(found) == len(first) == len(reader.read_tokens(native_run, iterations=[1, 2]))
    assert bits(found["logprobs_b"].to_numpy()) == bits(first.loc[found.index, "new_logprobs"].to_numpy())
    assert found.index.is_monotonic_increasing


@pytest.mark.parametrize(
    "read",
    [
        lambda run: run_page(run, 12),
        lambda run: list(evidence_of(run)),
        lambda run: list(run_pairs(run, "old_vs_first_new")),
        lambda run: list(load_iterations(run)),
        lambda run: summary_by_iteration(run, boundary="leading", iterations=None),
        run_agreement,
        measures_of,
    ],
)
def test_a_reader_of_three_iterations_does_not_read_the_manifest_for_each(
    native_run: Path, read: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look at a manifest checks the lines of all iterations, so the time would grow with their square."""
    loaded, load = [], manifest.load
    monkeypatch.setattr(manifest, "load", lambda run_dir: loaded.append(run_dir) or load(run_dir))
    read(native_run)
    assert len(loaded) < 3
