"""Rows of a dump, from JSON Lines, Parquet, or a `.pt` file of tensors and lists, of which no code is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppo_repro.errors import UserError, is_out_of_memory
from ppo_repro.json_lines import read_lines
from ppo_repro.output import shown

SUFFIXES = (".jsonl", ".parquet", ".pt")
INSIDE = ("samples", "rollout_data")  # where slime puts the rows, or the columns


def rows(path: Path, tokens: str, columns: frozenset[str]) -> Iterator[Mapping[str, Any]]:
    """One mapping for each response. Of a `.pt` file `tokens` says how many there are; it must have `columns` alike."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: must be a {', a '.join(SUFFIXES)} file")
    if path.suffix == ".jsonl":
        return (line.fields for line in read_lines("the dump", path, constants=True))
    return _parquet_rows(path) if path.suffix == ".parquet" else _tensor_rows(path, tokens, columns)


def no_column(where: object, name: str, fields: Mapping[str, Any]) -> UserError:
    """The error for a column that is not there."""
    return UserError(f"{where}: no column {name!r}; there are {shown(', '.join(map(str, fields)))}; choose --format")


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read ({reason}); give a whole Parquet file") from error


def _tensor_rows(path: Path, tokens: str, columns: frozenset[str]) -> Iterator[Mapping[str, Any]]:
    import torch

    loaded = _loaded(path)
    if isinstance(loaded, dict) and tokens not in loaded:
        loaded = next((loaded[name] for name in INSIDE if name in loaded), loaded)
    parts = loaded if isinstance(loaded, list) else [loaded]
    if not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path}: holds {type(loaded).__name__}; must be a dict of columns or a list of rows")
    for part in parts:
        if isinstance(loaded, dict) or any(isinstance(v, torch.Tensor) and v.dim() > 1 for v in part.values()):
            yield from _rows_of_columns(path, part, tokens, columns)
        else:
            yield {str(name): _plain(value) for name, value in part.items()}


def _loaded(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a file that torch.save wrote") from error
    except Exception as error:  # damaged files fail in many ways
        if is_out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        advice = "save a dict of tensors and lists, or a list of such dicts, with torch.save"
        raise UserError(f"{path}: cannot be read without running code from it ({shown(reason)}); {advice}") from error


def _rows_of_columns(
    path: Path, part: Mapping[Any, Any], tokens: str, columns: frozenset[str]
) -> Iterator[Mapping[str, Any]]:
    if not hasattr(part.get(tokens), "__len__"):
        raise no_column(path, tokens, part)
    count = len(part[tokens])
    whole = {str(name): values for name, values in part.items() if hasattr(values, "__len__")}
    for name in columns & whole.keys():
        if len(whole[name]) != count:
            raise UserError(f"{path}: {name} has {len(whole[name])} rows, {tokens} has {count}; all must have as many")
    alike = {name: values for name, values in whole.items() if len(values) == count}
    for row in zip(*alike.values(), strict=True):
        yield {name: _plain(value) for name, value in zip(alike, row, strict=True)}


def _plain(value: Any) -> Any:
    import torch

    return value.tolist() if isinstance(value, torch.Tensor) else value
