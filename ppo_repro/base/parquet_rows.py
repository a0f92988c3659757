"""Rows of a user's Parquet file, in the form of the lines of a JSON Lines file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import open_regular
from ppo_repro.base.json_lines import Line, read_lines
from ppo_repro.base.output import shown

AT_ONCE = 1000  # rows


def is_parquet(path: Path) -> bool:
    """Return whether a file is Parquet, by its name or its first bytes."""
    if path.suffix == ".parquet":
        return True
    try:
        with open_regular(path) as file:
            return file.read(4) == b"PAR1"
    except OSError:  # reading it as lines says why
        return False


def read_records(name: str, path: Path) -> Iterator[Line]:
    """Yield the rows of a Parquet file, or the lines of a JSON Lines file.

    Raises UserError if the file (`name` in messages) cannot be read or is empty, or has a wrong line.
    """
    return read_rows(name, path) if is_parquet(path) else read_lines(name, path)


def read_rows(name: str, path: Path) -> Iterator[Line]:
    """Yield the rows of a file, each without the columns that are null in it.

    Raises UserError if the file (`name` in messages) cannot be read or is empty, or if a value does not exist in JSON.
    """
    import pyarrow as pa  # a second that no other kind of prompts needs
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    fields = {column: value for column, value in row.items() if value is not None}
                    yield Line(_checked(f"{path}: row {number}", fields), number, fields)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{name} = {path}: cannot be read ({reason}); give a Parquet file") from error
    if not number:
        raise UserError(f"{name} = {path}: has no rows; give one row for each prompt")


def _checked(where: str, fields: dict[str, object]) -> str:
    for column, value in fields.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{where}: column '{shown(column)}' has what JSON does not have ({shown(str(error))}); leave it out"
            ) from None
    return where
