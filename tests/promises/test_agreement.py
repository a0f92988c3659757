"""A run, the analysis of its records, and a plain loop over its records count the same unequal bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis.agreement import agreement_of, run_agreement
from ppo_repro.analysis.mismatch import mismatch_by_iteration, mismatch_table
from ppo_repro.analysis.run_pairs import run_pairs
from ppo_repro.records import reader
from ppo_repro.records.logprob_pairs import TOKEN_KEY
from ppo_repro.runs.summary import summarise


def by_loop(run_dir: Path) -> dict[str, float]:
    """Return the figures of `iteration_agreement`, number by number; the hex of a float has all its bits."""
    tokens, updates = reader.read_tokens(run_dir), reader.read_updates(run_dir)
    pairs = [(float(row.old_logprobs), float(row.rollout_logprobs)) for row in tokens.itertuples()]
    values = {tuple(row[name] for name in TOKEN_KEY): row["values"] for row in tokens.to_dict("records")}
    first = updates[(updates["epoch"] == 0) & (updates["minibatch"] == 0)].to_dict("records")
    again = [(float(row["new_values"]), float(values[tuple(row[name] for name in TOKEN_KEY)])) for row in first]
    return {
        "unequal_old_rollout_logprobs": sum(old.hex() != rollout.hex() for old, rollout in pairs),
        "max_abs_old_rollout": max(float(np.float32(abs(old - rollout))) for old, rollout in pairs),
        "unequal_first_ratios": sum(float(row["ratios"]).hex() != (1.0).hex() for row in first),
        "unequal_values": sum(new.hex() != value.hex() for new, value in again),
    }


@pytest.mark.parametrize("which", ["deterministic_run", "native_run"])
def test_the_run_counted_what_the_records_hold(which: str, request: pytest.FixtureRequest) -> None:
    run_dir = request.getfixturevalue(which)
    again, logged = dataclasses.asdict(run_agreement(run_dir)), summarise(run_dir).figures
    shared = set(again) & set(logged)
    assert len(shared) >= 6
    assert {name: again[name] for name in shared} == {name: logged[name] for name in shared}
    counted = by_loop(run_dir)
    assert counted == {name: again[name] for name in counted} == {name: logged[name] for name in counted}
    assert bool(counted["unequal_old_rollout_logprobs"]) == (which == "native_run"), "the control differs"


@pytest.mark.parametrize("which", ["deterministic_run", "native_run"])
def test_so_does_the_table_of_the_mismatch(which: str, request: pytest.FixtureRequest) -> None:
    run_dir = request.getfixturevalue(which)
    table = mismatch_table(mismatch_by_iteration(run_pairs(run_dir)))
    values = table.set_index(["iteration", "metric", "reduction"])["value"]
    for row in reader.read_iterations(run_dir).itertuples():
        found = values[row.iteration]
        assert found["n_tokens", "count"] == row.tokens
        equal = round(found["frac_bitwise_equal", "token_mean"] * row.tokens)
        assert row.tokens - equal == row.unequal_old_rollout_logprobs
        # recorded as a float32 difference
        assert np.float32(found["abs_max", "token"]) == np.float32(row.max_abs_old_rollout)


@pytest.mark.parametrize(
    ("table", "column", "figure"),
    [
        ("tokens", "old_logprobs", "unequal_old_rollout_logprobs"),
        ("updates", "ratios", "unequal_first_ratios"),
        ("updates", "new_values", "unequal_values"),
    ],
)
def test_one_flipped_bit_is_counted(
    table: str, column: str, figure: str, deterministic_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: other records have another count. The first row of updates is of the first minibatch."""
    read: Callable[..., pd.DataFrame] = reader.read_table

    def flipped(name: str, *arguments: object, **options: object) -> pd.DataFrame:
        rows = read(name, *arguments, **options)
        if name != table or options.get("iterations") not in ([0], None):
            return rows
        numbers = rows[column].to_numpy(np.float32, copy=True)
        numbers.view(np.int32)[0] ^= 1
        return rows.assign(**{column: numbers})

    before = by_loop(deterministic_run)
    monkeypatch.setattr(reader, "read_table", flipped)
    monkeypatch.setattr(reader, f"read_{table}", partial(flipped, table))
    counted = dataclasses.asdict(run_agreement(deterministic_run))
    assert counted[figure] == before[figure] + 1 == by_loop(deterministic_run)[figure] == 1
    others = set(before) - {figure, "max_abs_old_rollout"}
    assert {name: counted[name] for name in others} == {name: before[name] for name in others}


def test_a_recorded_nan_is_an_unequal_ratio(deterministic_run: Path) -> None:
    """Null and NaN read as one; where the policy took a step the ratio is a NaN that training recorded."""
    tokens, updates = (read(deterministic_run, iterations=[0]) for read in (reader.read_tokens, reader.read_updates))
    before = agreement_of(tokens, updates)
    updates.loc[0, "ratios"] = np.nan
    counted = agreement_of(tokens, updates)
    assert counted.unequal_first_ratios == before.unequal_first_ratios + 1 == 1
    updates.loc[0, "clip_flag"] = None
    assert agreement_of(tokens, updates).unequal_first_ratios == 0, "no step, no ratio"
