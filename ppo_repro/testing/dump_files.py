"""Read the rows of a dump's file: JSON Lines, Parquet, or a `.pt` file of tensors and lists, whose code is never run.

Only a `.pt` file imports torch.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ppo_repro.base.errors import UserError, is_out_of_memory
from ppo_repro.base.json_lines import read_lines
from ppo_repro.base.output import shown
from ppo_repro.testing.dump_formats import EXTRA, DumpRow, Names, names_of, no_column

SUFFIXES = (".jsonl", ".parquet", ".pt")
INSIDE = ("samples", "rollout_data")  # slime's names for the rows, or the columns


def file_rows(path: Path, names: Names | str | None) -> Generator[DumpRow, None, None]:
    """Return the rows of a file, read as they are asked for. Raises UserError for a file of another kind."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: must be a {', a '.join(SUFFIXES)} file")
    if path.suffix == ".jsonl":
        return (line.fields for line in read_lines("the dump", path, constants=True))
    return _parquet_rows(path) if path.suffix == ".parquet" else _tensor_rows(path, names)


def _parquet_rows(path: Path) -> Generator[DumpRow, None, None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read ({reason}); give a whole Parquet file") from error


def _tensor_rows(path: Path, names: Names | str | None) -> Generator[DumpRow, None, None]:
    """Yield the rows of a `.pt` file: it has a dict of columns, or a list of rows or of such dicts."""
    loaded = _loaded(path)
    if isinstance(loaded, dict):
        loaded = next((loaded[name] for name in INSIDE if isinstance(loaded.get(name), dict | list)), loaded)
    parts = loaded if isinstance(loaded, list) else [loaded]
    if not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path}: holds {type(loaded).__name__}; must be a dict of columns or a list of rows")
    if not parts:
        return
    # as the first row decides in other files
    used = names if isinstance(names, Names) else names_of(str(path), map(str, parts[0]), names)
    are_rows = isinstance(loaded, list) and _are_rows(parts, used.sampler)
    for part in parts:
        if are_rows:
            yield {str(name): _plain(value) for name, value in part.items()}
            continue
        columns = _columns(path, part, used)
        for row in zip(*columns.values(), strict=True):
            yield {name: _plain(value) for name, value in zip(columns, row, strict=True)}


def _loaded(path: Path) -> Any:
    """Return what `torch.save` wrote, without running code from it."""
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


def _are_rows(parts: Sequence[Mapping[Any, Any]], sampler: str) -> bool:
    """Return whether the items of a list are responses; else each has columns of several responses.

    The first item with log-probs decides: an item without any may be an empty response, or columns of no response.
    """
    import torch

    def has_logprobs(part: Mapping[Any, Any]) -> bool:
        entries = _entries(part.get(sampler))
        return entries is not None and len(entries) > 0

    def is_tensor(value: Any, dimensions: int) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() >= dimensions

    part = next(filter(has_logprobs, parts), parts[0])
    logprobs = part.get(sampler)
    entries = logprobs if isinstance(logprobs, list | tuple) else ()
    has_rows = any(is_tensor(entry, 1) or isinstance(entry, list | tuple) for entry in entries)
    return not has_rows and not any(is_tensor(value, 2) for value in part.values())


def _columns(path: Path, part: Mapping[Any, Any], used: Names) -> dict[str, Any]:
    """Return the columns with an entry for each response. Raises UserError if a known column has more or fewer."""
    columns = {str(name): entries for name, value in part.items() if (entries := _entries(value)) is not None}
    if used.sampler not in columns:
        raise no_column(path, used.sampler, part)
    count = len(columns[used.sampler])
    spelled = (next((name for name in names if name in columns), "") for names in EXTRA.values())
    named = {name for f in fields(Names) if isinstance(name := getattr(used, f.name), str)}
    for name in sorted({*named, *spelled, *used.ahead} & columns.keys()):
        if len(columns[name]) != count:
            raise UserError(
                f"{path}: {name} has {len(columns[name])} rows, {used.sampler} has {count}; all must have as many"
            )
    return {name: entries for name, entries in columns.items() if len(entries) == count}


def _entries(value: Any) -> Any:
    """Return the entries of a column, one for each response; None for a value that is no column."""
    import torch

    if isinstance(value, torch.Tensor) and value.dim() > 0:
        # responses of different lengths are in a nested tensor
        return value.unbind() if value.is_nested else value
    return value if isinstance(value, list | tuple) else None


def _plain(value: Any) -> Any:
    """Return the numbers of a tensor; one without numbers, or a sparse one, gives a text, which no column may have."""
    import torch

    try:
        return value.tolist() if isinstance(value, torch.Tensor) else value
    except RuntimeError:
        return str(value)
