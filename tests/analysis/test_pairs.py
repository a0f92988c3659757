"""Pairs from runs are complete, in one shape, and have the recorded bits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.pairs import runs
from analysis.pairs.runs import run_pairs, two_run_pairs, whole_sequences
from ppo_repro.errors import UserError
from ppo_repro.records import reader
from tests.support import synthetic_run
from tests.support.cases.pairs import LENGTHS, random_chunk
from tests.support.synthetic_run import bits


def joined(chunks: Any) -> pd.DataFrame:
    return pd.concat(list(chunks), ignore_index=True)


@given(st.lists(LENGTHS, min_size=1, max_size=3), st.lists(st.integers(0, 60), max_size=6))
def test_no_sequence_is_split_and_no_chunk_has_two_iterations(lengths: list[list[int]], borders: list[int]) -> None:
    frame = joined(random_chunk(0, sizes, 0.1, iteration) for iteration, sizes in enumerate(lengths))
    edges = [0, *sorted(min(border, len(frame)) for border in borders), len(frame)]
    found = list(whole_sequences(frame.iloc[start:end] for start, end in pairwise(edges)))
    pd.testing.assert_frame_equal(joined(found), frame)
    assert all(chunk["iteration"].nunique() == 1 for chunk in found)
    keys = [set(zip(chunk["iteration"], chunk["sequence"], strict=True)) for chunk in found]
    assert sum(map(len, keys)) == len(set().union(*keys))


def test_rows_out_of_order_are_refused() -> None:
    frame = random_chunk(0, [2, 2], 0.1)
    with pytest.raises(ValueError, match="not in the order"):
        list(whole_sequences([frame, frame]))


@pytest.mark.parametrize("rows", [7, 1 << 18])
def test_the_pairs_of_a_run_are_the_recorded_bits(native_run: Path, rows: int) -> None:
    found = joined(run_pairs(native_run, rows=rows))
    tokens = reader.read_tokens(native_run)
    assert list(found.columns) == [*runs.REQUIRED, *runs.OPTIONAL]
    names = {"logprobs_a": "rollout_logprobs", "logprobs_b": "old_logprobs"}
    for name in found:
        assert bits(found[name].to_numpy()) == bits(tokens[names.get(name, name)].to_numpy())


def test_the_first_new_log_probs_of_a_run(native_run: Path) -> None:
    chunks = list(run_pairs(native_run, "old_vs_first_new", iterations=[1, 2]))
    assert [chunk["iteration"].unique().tolist() for chunk in chunks] == [[1], [2]]
    found = joined(chunks).set_index(runs.KEY)
    updates = reader.read_updates(native_run, iterations=[1, 2])
    first = updates[updates["epoch"] == 0].set_index(runs.KEY)
    assert len(found) == len(first) == len(reader.read_tokens(native_run, iterations=[1, 2]))
    assert bits(found["logprobs_b"].to_numpy()) == bits(first.loc[found.index, "new_logprobs"].to_numpy())
    assert found.index.is_monotonic_increasing


def changed_run(run: Path, table: str, columns: dict[str, pa.Array]) -> Path:
    """A run of one iteration of random values, some columns of one table set."""
    rows = len(next(iter(columns.values())))
    written = synthetic_run.start_run(run)
    tables = synthetic_run.random_tables(0, rows)
    for name, values in columns.items():
        place = tables[table].column_names.index(name)
        tables[table] = tables[table].set_column(place, tables[table].schema.field(place), values)
    written.append(0, tables)
    written.finish({}, {})
    return run


def test_tokens_of_steps_that_were_not_taken_are_no_pairs(tmp_path: Path) -> None:
    flags = ["none", None, "clip_high", None]
    columns = {"clip_flag": pa.array(flags, pa.string()), "epoch": pa.array([0, 0, 0, 1], pa.int32())}
    found = joined(run_pairs(changed_run(tmp_path / "a", "updates", columns), "old_vs_first_new"))
    assert found["sequence"].tolist() == [0, 2]


def test_a_run_against_itself_and_against_another(deterministic_run: Path, native_run: Path) -> None:
    same = joined(two_run_pairs(deterministic_run, deterministic_run, rows=100))
    assert bits(same["logprobs_a"].to_numpy()) == bits(same["logprobs_b"].to_numpy())
    first = joined(two_run_pairs(deterministic_run, native_run, iterations=[0], column="ref_logprobs"))
    for side, run in (("logprobs_a", deterministic_run), ("logprobs_b", native_run)):
        expected = reader.read_tokens(run, iterations=[0])["ref_logprobs"]
        assert bits(first[side].to_numpy()) == bits(expected.to_numpy())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[5, 6, 7], [5, 6, 8]], r"first differing token is iteration 0, sequence 2, position 2: token 7 against .* 8"),
        ([[5, 6, 7], [5, 6]], "only one has iteration 0, sequence 2, position 2: token 7"),
        ([[5, 6], [5, 6, 7]], "only one has iteration 0, sequence 2, position 2: token 7"),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 100])
def test_other_tokens_are_refused_by_name(tmp_path: Path, ids: list[list[int]], message: str, rows: int) -> None:
    columns = [{"token_id": pa.array(values, pa.int32())} for values in ids]
    one, other = (changed_run(tmp_path / str(index), "tokens", found) for index, found in enumerate(columns))
    with pytest.raises(UserError, match=message):
        list(two_run_pairs(one, other, rows=rows))


def test_wrong_arguments(tmp_path: Path) -> None:
    run = synthetic_run.make_run(tmp_path / "a", iterations=3)
    longer = synthetic_run.make_run(tmp_path / "b", iterations=4)
    with pytest.raises(UserError, match="pair = 'x': must be rollout_vs_old or old_vs_first_new"):
        run_pairs(run, "x")
    with pytest.raises(UserError, match="column = 'values': must be rollout_logprobs"):
        two_run_pairs(run, run, column="values")
    with pytest.raises(UserError, match=r"has 3 iterations, .* has 4; name the iterations"):
        two_run_pairs(run, longer)
