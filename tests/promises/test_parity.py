"""A run, the analysis of its records, and a plain loop over its records count the same unequal bits."""

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
from ppo_repro.testing.pairs import KEY


def by_loop(run_dir: Path) -> dict[str, float]:
    """Return the figures of `statistics.bits.disagreement`, number by number; the hex of a float has all its bits."""
    tokens, updates = reader.read_tokens(run_dir), reader.read_updates(run_dir)
    pairs = [(float(row.old_logprobs), float(row.rollout_logprobs)) for row in tokens.itertuples()]
    values = {tuple(row[name] for name in KEY): row["values"] for row in tokens.to_dict("records")}
    first = updates[(updates["epoch"] == 0) & (updates["minibatch"] == 0)].to_dict("records")
    again = [(float(row["new_values"]), float(values[tuple(row[name] for name in KEY)])) for row in first]
    return {
        "unequal_old_rollout_logprobs": sum(old.hex() != rollout.hex() for old, rollout in pairs),
        "max_abs_old_rollout": max(float(np.float32(abs(old - rollout))) for old, rollout in pairs),
        "unequal_first_ratios": sum(float(row["ratios"]).hex() != (1.0).hex() for row in first),
        "unequal_values": sum(new.hex() != value.hex() for new, value in again),
    }


@pytest.mark.parametrize("which", ["deterministic_run", "native_run"])
def test_the_run_counted_what_the_records_hold(which: str, request: pytest.FixtureRequest) -> None:
    run_dir = request.getfixturevalue(which)
    again, logged = dataclasses.asdict(parity(run_dir)), summarise(run_dir).figures
    shared = set(again) & set(logged)
    assert len(shared) >= 6
    assert {name: again[name] for name in shared} == {name: logged[name] for name in shared}
    counted = by_loop(run_dir)
    assert counted == {name: again[name] for name in counted} == {name: logged[name] for name in counted}
    assert bool(counted["unequal_old_rollout_logprobs"]) == (which == "native_run"), "the control differs"


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
