"""Write tables as CSV.

A spreadsheet computes a cell that begins with `=`; texts of models and users must not be computed.

A text that begins with one of `STARTS` and is no number gets an apostrophe before it. A reader of the file removes one
apostrophe from each text that begins with an apostrophe. Numbers do not change.
"""

from __future__ import annotations

import csv

import pandas as pd

# spreadsheets read the wide signs as the narrow ones
STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠", "'")


def cell(value: object) -> object:
    """Return a value that no spreadsheet computes: a text with an apostrophe if needed, other values unchanged."""
    if isinstance(value, str) and value.startswith(STARTS) and not _is_number(value):
        return f"'{value}"
    return value


def csv_text(frame: pd.DataFrame, float_format: str | None = None) -> str:
    """Return the frame as CSV without its index; without `float_format`, floats are exact."""
    texts = frame.select_dtypes(exclude="number").map(cell)
    safe = frame.copy()
    safe[texts.columns] = texts
    safe.columns = safe.columns.map(cell)
    # a carriage return ends a line for readers, and is not quoted where lines end with "\n"
    has_return = any("\r" in str(value) for value in [*safe.columns, *texts.to_numpy().flat])
    return safe.to_csv(
        index=False,
        float_format=float_format,
        lineterminator="\n",
        quoting=csv.QUOTE_ALL if has_return else csv.QUOTE_MINIMAL,
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and text == text.strip()
