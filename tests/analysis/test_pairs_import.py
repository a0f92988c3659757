"""Files of other stacks become pairs; nothing is guessed, and wrong input is refused with its row."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.pairs.files import PRESETS, Columns, imported_pairs, iteration_of, masked_tokens
from ppo_repro.errors import UserError

# two responses, one token of the first masked; where a stack records prompts, they are tokens 1 and 2
IDS = [[5, 6, 7, 8], [9, 10]]
A = [[-0.5, -1.5, -2.0, -0.25], [-3.0, -0.125]]
B = [[-0.5, -1.25, -2.0, -0.5], [-3.0, -0.25]]
MASK = [[1, 1, 0, 1], [1, 1]]
NAMES = Columns("ids", "a", "b", mask="mask")


def joined(chunks: Any) -> pd.DataFrame:
    return pd.concat(list(chunks), ignore_index=True)


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """The two responses in the names and shapes of a stack."""
    found = []
    for index in range(2):
        row: dict[str, Any] = {
            columns.token_ids: ([1, 2] if columns.response_length else []) + IDS[index],
            columns.logprobs_a: A[index],
            columns.logprobs_b: B[index],
            str(columns.mask): MASK[index],
        }
        if columns.entropies:
            row[columns.entropies] = [0.5] * len(IDS[index])
        if columns.iteration:
            row[columns.iteration] = index
        if columns.response_length:
            row[columns.response_length] = len(IDS[index])
        found.append(row)
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_files_of_every_stack(tmp_path: Path, preset: str, suffix: str) -> None:
    path = write(tmp_path / f"dump{suffix}", rows_of(PRESETS[preset]))
    chunks = list(imported_pairs(path, preset))
    found = joined(chunks)
    assert found["token_id"].tolist() == [5, 6, 8, 9, 10]
    assert found["position"].tolist() == [0, 1, 3, 0, 1]
    assert found["sequence"].tolist() == [0, 0, 0, 1, 1]
    assert found["iteration"].tolist() == ([0, 0, 0, 1, 1] if PRESETS[preset].iteration else [0] * 5)
    assert found["logprobs_a"].tolist() == [-0.5, -1.5, -0.25, -3.0, -0.125]
    assert found["logprobs_b"].tolist() == [-0.5, -1.25, -0.5, -3.0, -0.25]
    assert found["logprobs_a"].dtype == np.float32
    assert sum(map(masked_tokens, chunks)) == 1
    assert ("entropies" in found) == (PRESETS[preset].entropies is not None)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_one_row_per_token(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"s": index, "id": IDS[index][t], "a": A[index][t], "b": B[index][t], "m": bool(MASK[index][t]), "adv": 0.5}
        for index in range(2)
        for t in range(len(IDS[index]))
    ]
    columns = Columns("id", "a", "b", mask="m", sequence="s", advantages="adv")
    path = write(tmp_path / f"dump{suffix}", rows)
    (found,) = imported_pairs(path, columns)
    assert found["position"].tolist() == [0, 1, 3, 0, 1] and found["sequence"].tolist() == [0, 0, 0, 1, 1]
    assert found["token_id"].tolist() == [5, 6, 8, 9, 10] and found["advantages"].tolist() == [0.5] * 5
    assert masked_tokens(found) == 1
    with pytest.raises(UserError, match="sequence must name a column"):
        list(imported_pairs(path, dataclasses.replace(columns, sequence=None)))
    back = write(tmp_path / f"back{suffix}", rows[::-1])
    with pytest.raises(UserError, match=r"\(0, 0\) comes too late; sort the file"):
        list(imported_pairs(back, columns))


def test_parquet_lists_of_fixed_size_and_float32(tmp_path: Path) -> None:
    ids = pa.FixedSizeListArray.from_arrays(pa.array([1, 2, 3, 4], pa.int32()), 2)
    numbers = pa.FixedSizeListArray.from_arrays(pa.array([-1.0, -2.0, -3.0, -4.0], pa.float32()), 2)
    pq.write_table(pa.table({"ids": ids, "a": numbers, "b": numbers}), tmp_path / "a.parquet")
    found = joined(imported_pairs(tmp_path / "a.parquet", Columns("ids", "a", "b")))
    assert found["token_id"].tolist() == [1, 2, 3, 4] and found["logprobs_b"].tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert found["position"].tolist() == [0, 1, 0, 1]


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{index}.jsonl", rows_of(NAMES)) for index in range(2)]
    assert joined(imported_pairs(paths, NAMES))["sequence"].unique().tolist() == [0, 1, 2, 3]


def test_advantages_per_response_are_repeated_and_null_log_probs_are_nan(tmp_path: Path) -> None:
    rows = [{"ids": [1, 2], "a": [None, -1.0], "b": [-1.0, -1], "adv": 2.0}]
    found = joined(imported_pairs(write(tmp_path / "a.jsonl", rows), Columns("ids", "a", "b", advantages="adv")))
    assert np.isnan(found["logprobs_a"]).tolist() == [True, False]
    assert found["logprobs_b"].tolist() == [-1.0, -1.0] and found["advantages"].tolist() == [2.0, 2.0]


def test_a_chunk_that_the_mask_emptied_still_counts(tmp_path: Path) -> None:
    rows = [{"ids": [1, 2], "a": [-1.0, -1.0], "b": [-1.0, -1.0], "mask": [0, 0]}]
    (found,) = imported_pairs(write(tmp_path / "a.jsonl", rows), NAMES)
    assert len(found) == 0 and masked_tokens(found) == 2 and iteration_of(found) == 0


def changed(**columns: Any) -> list[dict[str, Any]]:
    """The two responses with a column of the second one replaced."""
    rows = rows_of(NAMES)
    rows[1].update(columns)
    return rows


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed(b=[-1.0]), "row 1: b and a have different lengths"),
        (changed(ids=[1, 2, 3]), "row 1: ids and a have different lengths"),
        (changed(mask=[1]), "row 1: mask and a have different lengths"),
        (changed(ids=[1, None]), "row 1: column ids holds null"),
        (changed(mask=None), "row 1: column mask is null"),
        ([{"ids": [1], "a": [-1.0], "mask": [1]}], "no column 'b'; there are ids, a, mask"),
        ([{"ids": [1], "a": -1.0, "b": [-1.0], "mask": [1]}], "column a holds double, expected numbers, one list"),
        ([{"ids": [1.5], "a": [-1.0], "b": [-1.0], "mask": [1]}], r"column ids holds .*, expected integers, one list"),
        ([{"ids": ["x"], "a": [-1.0], "b": [-1.0], "mask": [1]}], r"column ids holds .*string.*, expected integers"),
        ([{"ids": [1], "a": ["-1"], "b": [-1.0], "mask": [1]}], r"column a holds .*string.*, expected numbers"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_row(
    tmp_path: Path, rows: list[dict[str, Any]], message: str, suffix: str
) -> None:
    path = write(tmp_path / f"a{suffix}", rows)
    with pytest.raises(UserError, match=message) as caught:
        list(imported_pairs(path, NAMES))
    assert "\n" not in str(caught.value)


def test_a_response_length_must_fit(tmp_path: Path) -> None:
    slime = rows_of(PRESETS["slime"])
    slime[1]["response_length"] = 3
    with pytest.raises(UserError, match="row 1: response_length is not the length of rollout_log_probs"):
        list(imported_pairs(write(tmp_path / "a.jsonl", slime), "slime"))
    slime[1].update(response_length=2, tokens=[9])
    with pytest.raises(UserError, match="row 1: tokens is shorter than the response"):
        list(imported_pairs(write(tmp_path / "b.jsonl", slime), "slime"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "must be a .jsonl or a .parquet file"),
        ("a.jsonl", b"{", r"a\.jsonl:1: not valid JSON"),
        ("a.jsonl", b"\n", r"a\.jsonl: is empty"),
        ("a.jsonl", b'{"ids": [1], "a": ["\\ud800"], "b": [1], "mask": [1]}', r"a\.jsonl: values of"),
        ("a.jsonl", b'{"ids": [1], "a": [1, "x"], "b": [1], "mask": [1]}', r"a\.jsonl: values of different"),
        ("a.parquet", b"no", "cannot be read"),
        ("missing.jsonl", None, "cannot be read"),
        ("missing.parquet", None, "cannot be read"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        list(imported_pairs(tmp_path / name, NAMES))
    assert "\n" not in str(caught.value)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(UserError, match="columns = 'areal': the presets are verl, trl, prime_rl, slime"):
        imported_pairs("a.jsonl", "areal")
