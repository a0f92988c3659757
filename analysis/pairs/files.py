"""Log-prob pairs from files that other training stacks dumped: JSONL or Parquet.

One row is a response (lists) or a token (numbers). `Columns` has the file's column names; `PRESETS` has those of some
stacks. Nothing is guessed: a named column that is missing is an error, and so are lists of different lengths. Log-probs
are rounded to float32, the type they are computed in; where a file has fewer digits, a ULP means less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ppo_repro.errors import UserError
from ppo_repro.json_lines import read_lines

_ADVICE = "name the columns with Columns(...)"


@dataclass(frozen=True)
class Columns:
    """The names of the columns in a file; None: there is no such column."""

    token_ids: str
    logprobs_a: str  # of the sampler
    logprobs_b: str  # of the trainer, before its first step
    mask: str | None = None  # 1 or true: the token counts; 0 or false: it is dropped
    entropies: str | None = None
    log_kept_mass: str | None = None
    advantages: str | None = None  # per token, or one per response
    iteration: str | None = None  # never decreasing; without it all rows are of iteration 0
    response_length: str | None = None  # where token_ids begin with the prompt: how many at the end are the response
    sequence: str | None = None  # only and always where a row is a token; never decreasing within an iteration


PRESETS = {
    "verl": Columns("responses", "rollout_log_probs", "old_log_probs", mask="response_mask"),
    "trl": Columns("completion_ids", "sampling_per_token_logps", "old_per_token_logps", mask="completion_mask"),
    "prime_rl": Columns(
        *("token_ids", "inference_logprobs", "trainer_logprobs"),
        mask="loss_mask",
        entropies="entropy",
        iteration="step",
    ),
    "slime": Columns(
        *("tokens", "rollout_log_probs", "log_probs"), mask="loss_mask", response_length="response_length"
    ),
}
_INTEGERS = ("token_ids", "mask", "iteration", "response_length", "sequence")
_FLOATS = ("logprobs_a", "logprobs_b", "entropies", "log_kept_mass", "advantages")


def imported_pairs(paths: Path | str | Sequence[Path | str], columns: Columns | str) -> Iterator[pd.DataFrame]:
    """Chunks as in `analysis.pairs.runs`; `columns` is a preset's name or a `Columns`. All files are in memory at once.

    Where a row is a response, the sequence is the number of the row over all files, and the position is the index in
    the list, masked tokens included. Log-probs are in nats; null ones become NaN. Masked tokens are dropped and
    counted in `chunk.attrs["masked"]`. Raises UserError that names file and row.
    """
    if isinstance(columns, str) and columns not in PRESETS:
        raise UserError(f"columns = {columns!r}: the presets are {', '.join(PRESETS)}; or {_ADVICE}")
    names = PRESETS[columns] if isinstance(columns, str) else columns
    frames: list[pd.DataFrame] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        table = _read(path, names)
        if _is_list(table.schema.field("token_ids").type):
            before = int(frames[-1]["sequence"].iloc[-1]) + 1 if frames and len(frames[-1]) else 0
            frames.append(_of_responses(path, names, table, before))
        else:
            frames.append(_of_tokens(path, names, table))
    tokens = pd.concat(frames, ignore_index=True)
    keys = tokens[["iteration", "sequence"]].to_numpy()
    step = np.diff(keys, axis=0)
    back = np.flatnonzero((step[:, 0] < 0) | ((step[:, 0] == 0) & (step[:, 1] < 0)))
    if back.size:
        raise UserError(
            f"iteration, sequence {tuple(keys[back[0] + 1].tolist())} comes too late; sort the file by them"
        )
    tokens["position"] = tokens.groupby(["iteration", "sequence"]).cumcount()
    return (_unmasked(chunk) for _, chunk in tokens.groupby("iteration"))


def _unmasked(chunk: pd.DataFrame) -> pd.DataFrame:
    frame = chunk[chunk["mask"] != 0].drop(columns="mask").reset_index(drop=True)
    frame.attrs.update(masked=len(chunk) - len(frame), iteration=int(chunk["iteration"].iloc[0]))
    return frame


def masked_tokens(chunk: pd.DataFrame) -> int:
    """How many tokens a mask removed from this chunk."""
    return int(chunk.attrs.get("masked", 0))


def iteration_of(chunk: pd.DataFrame) -> int:
    """The iteration of a chunk, also where a mask left no row."""
    return int(chunk["iteration"].iloc[0] if len(chunk) else chunk.attrs["iteration"])


def _read(path: Path, columns: Columns) -> pa.Table:
    """The rows of a file with our column names, their types checked."""
    names = {field.name: getattr(columns, field.name) for field in fields(Columns)}
    wanted = {name: column for name, column in names.items() if column is not None}
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{path}: must be a .jsonl or a .parquet file")
    table = _parquet(path, wanted) if path.suffix == ".parquet" else _json_lines(path, wanted)
    is_list = _is_list(table.schema.field("token_ids").type)
    for name in wanted:
        _check_type(path, columns, name, table.schema.field(name).type, is_list)
    return table


def _parquet(path: Path, wanted: dict[str, str]) -> pa.Table:
    try:
        available = pq.read_schema(path).names
        for column in wanted.values():
            if column not in available:
                raise UserError(f"{path}: no column {column!r}; there are {', '.join(available)}; {_ADVICE}")
        table = pq.read_table(path, columns=list(wanted.values()))
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read ({reason}); give a whole Parquet file") from error
    return pa.table({name: table.column(column).combine_chunks() for name, column in wanted.items()})


def _json_lines(path: Path, wanted: dict[str, str]) -> pa.Table:
    rows: list[list[Any]] = []
    for line in read_lines("the dump", path, constants=True):
        for column in wanted.values():
            if column not in line.fields:
                there = ", ".join(line.fields)
                raise UserError(f"{line.where}: no column {column!r}; there are {there}; {_ADVICE}")
        rows.append([line.fields[column] for column in wanted.values()])
    try:
        return pa.table(
            {name: pa.array(list(column)) for name, column in zip(wanted, zip(*rows, strict=True), strict=True)}
        )
    except (pa.ArrowException, OverflowError, TypeError, UnicodeError) as error:
        raise UserError(f"{path}: values of different types ({' '.join(str(error).split())})") from error


def _check_type(path: Path, columns: Columns, name: str, data_type: pa.DataType, is_list: bool) -> None:
    inner = data_type.value_type if _is_list(data_type) else data_type
    of_response = name in ("iteration", "response_length") or (name == "advantages" and not _is_list(data_type))
    numeric = pa.types.is_integer(inner) or pa.types.is_boolean(inner) or pa.types.is_null(inner)
    good = numeric or (pa.types.is_floating(inner) and name in _FLOATS)
    if not good or _is_list(data_type) != (is_list and not of_response):
        expected = f"{'integers' if name in _INTEGERS else 'numbers'}{', one list a row' if is_list else ''}"
        raise UserError(f"{path}: column {getattr(columns, name)} holds {data_type}, expected {expected}; {_ADVICE}")
    if is_list and name == "sequence":
        raise UserError(f"{path}: rows are whole responses, numbered by row; sequence must be None")


def _is_list(data_type: pa.DataType) -> bool:
    checks = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(check(data_type) for check in checks)


def _of_responses(path: Path, columns: Columns, table: pa.Table, first_sequence: int) -> pd.DataFrame:
    """One row per token of each response; where token_ids begin with the prompt, of the last ones."""

    def refuse(bad: npt.NDArray[np.bool_], reason: str) -> None:
        if bad.any():
            raise UserError(f"{path}: row {int(np.flatnonzero(bad)[0])}: {reason}")

    lists = [name for name in table.column_names if _is_list(table.schema.field(name).type)]
    for name in lists:
        refuse(table[name].is_null().to_numpy(), f"column {getattr(columns, name)} is null")
    lengths = {name: pc.list_value_length(table[name]).to_numpy().astype(np.int64) for name in lists}
    count, rows = lengths["logprobs_a"], np.arange(table.num_rows)
    for name in lists:
        if name == "token_ids" and columns.response_length is not None:
            declared = _numbers(path, columns, "response_length", table["response_length"])
            refuse(declared != count, f"{columns.response_length} is not the length of {columns.logprobs_a}")
            refuse(lengths[name] < count, f"{columns.token_ids} is shorter than the response")
        else:
            refuse(lengths[name] != count, f"{getattr(columns, name)} and {columns.logprobs_a} have different lengths")
    position = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    frame = {"sequence": np.repeat(first_sequence + rows, count)}
    for name in set(table.column_names) - {"response_length"}:
        if name not in lists:
            frame[name] = np.repeat(_numbers(path, columns, name, table[name]), count)
            continue
        flat = pc.list_flatten(table[name])
        if name in _INTEGERS and flat.null_count:
            nulls = np.repeat(rows, lengths[name])[flat.is_null().to_numpy()]
            refuse(np.isin(rows, nulls), f"column {getattr(columns, name)} holds null")
        chosen = np.repeat(np.cumsum(lengths[name]) - count, count) + position
        frame[name] = _numbers(path, columns, name, flat)[chosen]
    return _shaped(frame)


def _of_tokens(path: Path, columns: Columns, table: pa.Table) -> pd.DataFrame:
    if columns.sequence is None or columns.response_length is not None:
        raise UserError(f"{path}: rows are single tokens: sequence must name a column, response_length must be None")
    return _shaped({name: _numbers(path, columns, name, table[name]) for name in table.column_names})


def _numbers(path: Path, columns: Columns, name: str, column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """int64, with booleans as 0 and 1, or float32; numbers beyond float32 are infinite, null ones are NaN."""
    if name in _INTEGERS:
        if column.null_count:
            raise UserError(f"{path}: column {getattr(columns, name)} holds null")
        return column.cast(pa.int64()).to_numpy()
    with np.errstate(over="ignore"):
        return column.cast(pa.float64()).to_numpy().astype(np.float32)


def _shaped(frame: dict[str, npt.NDArray[Any]]) -> pd.DataFrame:
    rows = len(frame["logprobs_a"])
    columns = {"iteration": np.zeros(rows, np.int64), "mask": np.ones(rows, np.int64), **frame}
    columns |= {"token_id": frame["token_ids"], "position": np.zeros(rows, np.int64)}
    order = ["iteration", "sequence", "position", "token_id", *_FLOATS, "mask"]
    return pd.DataFrame({name: columns[name] for name in order if name in columns})
