"""Log-prob pairs from files that other training stacks dumped: JSONL or Parquet.

One row is a response (lists) or a token (numbers); the first row decides which. `Columns` has the file's column names;
`PRESETS` has those of some stacks. Nothing is guessed: a named column that is missing is an error, and so are lists of
different lengths. Log-probs are rounded to float32, the type they are computed in; where a file has fewer digits, a
ULP means less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from analysis.pairs.runs import ROWS, whole_sequences
from ppo_repro.errors import UserError
from ppo_repro.json_lines import Line, read_lines

# responses read at once: a response may be long
_RESPONSES = 64
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
    position: str | None = None  # only where a row is a token; without it tokens are counted


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
_INTEGERS = ("token_ids", "mask", "iteration", "response_length", "sequence", "position")
_PER_RESPONSE = ("iteration", "response_length")
_FLOATS = ("logprobs_a", "logprobs_b", "entropies", "log_kept_mass", "advantages")


def imported_pairs(
    paths: Path | str | Sequence[Path | str], columns: Columns | str, *, rows: int = ROWS
) -> Iterator[pd.DataFrame]:
    """Chunks of about `rows` tokens (see `analysis.pairs.runs`); `columns` is a preset's name or a `Columns`.

    Where a row is a response, the sequence is the number of the row over all files, and the position is the index in
    the list, masked tokens included. Log-probs are in nats; null ones become NaN. Masked tokens are dropped and
    counted in `chunk.attrs["masked"]`. Raises UserError that names file and row.
    """
    if isinstance(columns, str) and columns not in PRESETS:
        raise UserError(f"columns = {columns!r}: the presets are {', '.join(PRESETS)}; or {_ADVICE}")
    if rows < 1:
        raise UserError(f"rows = {rows}: a chunk must have at least 1 token")
    names = PRESETS[columns] if isinstance(columns, str) else columns
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    return _unmasked(whole_sequences(_gathered(_frames(files, names, rows), rows)))


def _unmasked(chunks: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    for chunk in chunks:
        unmasked = chunk["mask"].to_numpy() != 0
        frame = chunk.loc[unmasked].drop(columns="mask").reset_index(drop=True)
        frame.attrs.update(masked=len(chunk) - len(frame), iteration=int(chunk["iteration"].iloc[0]))
        yield frame


def _gathered(frames: Iterator[pd.DataFrame], rows: int) -> Iterator[pd.DataFrame]:
    waiting: list[pd.DataFrame] = []
    for frame in frames:
        waiting.append(frame)
        if sum(map(len, waiting)) >= rows:
            yield pd.concat(waiting, ignore_index=True)
            waiting = []
    yield from [pd.concat(waiting, ignore_index=True)] if waiting else []


def _frames(files: Sequence[Path], columns: Columns, rows: int) -> Iterator[pd.DataFrame]:
    """The tokens of every file, with a column `mask`, their order checked."""
    sequence, last = 0, (-1, -1, -1)
    for path in files:
        for first, batch in _batches(path, columns, rows):
            named = f"{path}: rows {first} to {first + batch.num_rows - 1}"
            is_list = _is_list(batch.schema.field("token_ids").type)
            for name in batch.column_names:
                _check_type(named, columns, name, batch.schema.field(name).type, is_list)
            if is_list:
                frame = _exploded(path, first, columns, batch, sequence)
                sequence += batch.num_rows
            else:
                frame = _scalars(named, columns, batch)
            last = _in_order(named, frame, last)
            yield frame


def _check_type(named: str, columns: Columns, name: str, data_type: pa.DataType, is_list: bool) -> None:
    inner = data_type.value_type if _is_list(data_type) else data_type
    of_response = name in _PER_RESPONSE or (name == "advantages" and not _is_list(data_type))
    numeric = pa.types.is_integer(inner) or pa.types.is_boolean(inner) or pa.types.is_null(inner)
    good = numeric or (pa.types.is_floating(inner) and name in _FLOATS)
    if not good or _is_list(data_type) != (is_list and not of_response):
        expected = f"{'integers' if name in _INTEGERS else 'numbers'}{', one list a row' if is_list else ''}"
        raise UserError(f"{named}: column {getattr(columns, name)} holds {data_type}, expected {expected}; {_ADVICE}")
    if is_list and name in ("sequence", "position"):
        raise UserError(f"{named}: rows are whole responses, numbered by row; {name} must be None")


def _is_list(data_type: pa.DataType) -> bool:
    checks = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(check(data_type) for check in checks)


def _exploded(path: Path, first: int, columns: Columns, batch: pa.Table, sequence: int) -> pd.DataFrame:
    """One row per token of each response."""

    def refuse(bad: npt.NDArray[np.bool_], reason: str) -> None:
        if bad.any():
            raise UserError(f"{path}: row {first + int(np.flatnonzero(bad)[0])}: {reason}")

    lists = [name for name in batch.column_names if _is_list(batch.schema.field(name).type)]
    lengths = {}
    for name in lists:
        lists_of_column = batch.column(name)
        refuse(lists_of_column.is_null().to_numpy(), f"column {getattr(columns, name)} is null")
        lengths[name] = pc.list_value_length(lists_of_column).to_numpy().astype(np.int64)
    count = lengths["logprobs_a"]
    for name in lists:
        if name == "token_ids" and columns.response_length is not None:
            declared = _numbers(f"{path}: row {first}", columns, batch, "response_length").astype(np.int64)
            refuse(declared != count, f"{columns.response_length} is not the length of {columns.logprobs_a}")
            refuse(lengths[name] < count, f"{columns.token_ids} is shorter than the response")
        else:
            refuse(lengths[name] != count, f"{getattr(columns, name)} and {columns.logprobs_a} have different lengths")
    position = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    frame = {"position": position}
    for name in batch.column_names:
        if name not in lists:
            if name != "response_length":
                frame[name] = np.repeat(_numbers(f"{path}: row {first}", columns, batch, name), count)
            continue
        flat = pc.list_flatten(batch.column(name))
        owner = np.repeat(np.arange(batch.num_rows), lengths[name])
        if name in _INTEGERS and flat.null_count:
            nulls = (
                flat.is_null().to_numpy(zero_copy_only=False)
                if isinstance(flat, pa.Array)
                else flat.is_null().to_numpy()
            )
            refuse(np.isin(np.arange(batch.num_rows), owner[nulls]), f"column {getattr(columns, name)} holds null")
        # the last `count` of each list
        ends = np.cumsum(lengths[name])
        frame[name] = _plain(name, flat)[np.repeat(ends - count, count) + position]
    frame["sequence"] = np.repeat(np.arange(sequence, sequence + batch.num_rows), count)
    return _shaped(frame)


def _scalars(named: str, columns: Columns, batch: pa.Table) -> pd.DataFrame:
    if columns.sequence is None or columns.response_length is not None:
        raise UserError(f"{named}: rows are single tokens: sequence must name a column, response_length must be None")
    frame = {name: _numbers(named, columns, batch, name) for name in batch.column_names}
    return _shaped(frame)


def _numbers(named: str, columns: Columns, batch: pa.Table, name: str) -> npt.NDArray[Any]:
    values = batch.column(name)
    if values.null_count and name in _INTEGERS:
        raise UserError(f"{named}: column {getattr(columns, name)} holds null")
    return _plain(name, values)


def _plain(name: str, column: pa.ChunkedArray) -> npt.NDArray[Any]:
    # booleans become 0 and 1
    numbers = column.cast(pa.int64() if name in _INTEGERS else pa.float64())
    values = numbers.to_numpy(zero_copy_only=False) if isinstance(numbers, pa.Array) else numbers.to_numpy()
    # numbers beyond float32 become infinite and are counted as not finite
    with np.errstate(over="ignore"):
        return values if name in _INTEGERS else values.astype(np.float32)


def _shaped(frame: dict[str, npt.NDArray[Any]]) -> pd.DataFrame:
    rows = len(frame["logprobs_a"])
    usual = {"iteration": np.zeros(rows, np.int64), "mask": np.ones(rows, np.int64), "position": np.full(rows, -1)}
    order = ["iteration", "sequence", "position", "token_id", *_FLOATS, "mask"]
    columns = {"token_id": frame["token_ids"], **usual, **frame}
    return pd.DataFrame({name: columns[name] for name in order if name in columns})


def _in_order(named: str, frame: pd.DataFrame, last: tuple[int, int, int]) -> tuple[int, int, int]:
    """Number the positions where the file has none, check the order of rows, and return the last key."""
    if not len(frame):
        return last
    keys = frame[["iteration", "sequence"]].to_numpy()
    before = np.concatenate([[last[:2]], keys])
    step = np.diff(before, axis=0)
    new = step.any(axis=1)
    position = frame["position"].to_numpy().copy()
    if (position < 0).all():
        starts = np.maximum.accumulate(np.where(new, np.arange(len(frame)), -1))
        position = np.where(starts < 0, np.arange(len(frame)) + last[2] + 1, np.arange(len(frame)) - starts)
        frame["position"] = position
    back = (step[:, 0] < 0) | ((step[:, 0] == 0) & (step[:, 1] < 0))
    back |= ~new & (np.diff(np.concatenate([[last[2]], position])) <= 0)
    if back.any():
        row = tuple(int(x) for x in (*keys[np.flatnonzero(back)[0]], position[np.flatnonzero(back)[0]]))
        raise UserError(f"{named}: iteration, sequence, position {row} comes too late; sort the file by them")
    return int(keys[-1][0]), int(keys[-1][1]), int(position[-1])


def _batches(path: Path, columns: Columns, rows: int) -> Iterator[tuple[int, pa.Table]]:
    """(number of the first row, rows as a table with our column names), batch by batch."""
    names = {field.name: getattr(columns, field.name) for field in fields(Columns)}
    wanted = {name: column for name, column in names.items() if column is not None}
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{path}: must be a .jsonl or a .parquet file")
    first = 0
    for table in (_parquet if path.suffix == ".parquet" else _json_lines)(path, wanted, rows):
        yield first, table
        first += table.num_rows


def _parquet(path: Path, wanted: dict[str, str], rows: int) -> Iterator[pa.Table]:
    try:
        with pq.ParquetFile(path, buffer_size=1 << 16) as file:
            available = file.schema_arrow.names
            for column in wanted.values():
                if column not in available:
                    raise UserError(f"{path}: no column {column!r}; there are {', '.join(available)}; {_ADVICE}")
            is_list = _is_list(file.schema_arrow.field(wanted["token_ids"]).type)
            size = _RESPONSES if is_list else rows
            for batch in file.iter_batches(batch_size=size, columns=list(wanted.values())):
                yield pa.table({name: batch.column(column) for name, column in wanted.items()})
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read ({reason}); give a whole Parquet file") from error


def _json_lines(path: Path, wanted: dict[str, str], rows: int) -> Iterator[pa.Table]:
    lines, size = read_lines("the dump", path, constants=True), 1
    while batch := list(islice(lines, size)):
        parsed = [_values(line, wanted) for line in batch]
        # the first row decides whether rows are responses or tokens
        size = _RESPONSES if isinstance(parsed[0][0], list) else rows
        columns = dict(zip(wanted, zip(*parsed, strict=True), strict=True))
        try:
            table = pa.table({name: pa.array(list(column)) for name, column in columns.items()})
        except (pa.ArrowException, OverflowError, TypeError, UnicodeError) as error:
            where = f"{batch[0].where} to {batch[-1].number}"
            raise UserError(f"{where}: values of different types ({' '.join(str(error).split())})") from error
        yield table


def _values(line: Line, wanted: dict[str, str]) -> list[Any]:
    for column in wanted.values():
        if column not in line.fields:
            there = ", ".join(line.fields)
            raise UserError(f"{line.where}: no column {column!r}; there are {there}; {_ADVICE}")
    return [line.fields[column] for column in wanted.values()]
