"""What a run counts while it computes is what the analysis counts in its records: two implementations, one number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis.mismatch.parity import parity
from ppo_repro.analysis.mismatch.tables import measure, tables
from ppo_repro.analysis.pairs.runs import run_pairs
from ppo_repro.records import reader
from ppo_repro.runs.summary import summarise


@pytest.mark.parametrize("which", ["deterministic_run", "native_run"])
def test_the_run_counted_what_the_records_hold(which: str, request: pytest.FixtureRequest) -> None:
    run_dir = request.getfixturevalue(which)
    again, logged = dataclasses.asdict(parity(run_dir)), summarise(run_dir).figures
    shared = set(again) & set(logged)
    assert len(shared) >= 6
    assert {name: again[name] for name in shared} == {name: logged[name] for name in shared}
    assert bool(again["unequal_old_rollout_logprobs"]) == (which == "native_run"), "the control differs"


@pytest.mark.parametrize("which", ["deterministic_run", "native_run"])
def test_so_does_the_table_of_the_mismatch(which: str, request: pytest.FixtureRequest) -> None:
    run_dir = request.getfixturevalue(which)
    update = tables(measure(run_pairs(run_dir))).update.set_index(["iteration", "metric", "reduction"])["value"]
    for row in reader.read_iterations(run_dir).itertuples():
        found = update[row.iteration]
        assert found["n_tokens", "count"] == row.tokens
        equal = round(found["frac_bitwise_equal", "token_mean"] * row.tokens)
        assert row.tokens - equal == row.unequal_old_rollout_logprobs
        # recorded as a float32 difference
        assert np.float32(found["abs_max", "token"]) == np.float32(row.max_abs_old_rollout)


def test_one_flipped_bit_is_counted(deterministic_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: other records have another count."""
    read: Callable[..., pd.DataFrame] = reader.read_tokens

    def flipped(*arguments: object, **options: object) -> pd.DataFrame:
        tokens = read(*arguments, **options)
        old = tokens["old_logprobs"].to_numpy(copy=True)
        old.view(np.int32)[5] ^= int(options["iterations"] == [0])
        return tokens.assign(old_logprobs=old)

    monkeypatch.setattr(reader, "read_tokens", flipped)
    assert parity(deterministic_run).unequal_old_rollout_logprobs == 1
