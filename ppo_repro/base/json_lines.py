"""Read a user's JSON Lines: one object per line. Every line is checked, and messages name FILE:LINE."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import open_regular
from ppo_repro.base.output import shown

LONGEST_LINE = 1 << 26  # bytes
_BOM = b"\xef\xbb\xbf"
_COMPRESSED, _UTF16 = "is compressed; unpack it", "is UTF-16; save it as UTF-8"
_OTHER_FORMATS = {
    b"\x1f\x8b": _COMPRESSED,  # gzip
    b"PK\x03\x04": _COMPRESSED,  # ZIP
    b"(\xb5/\xfd": _COMPRESSED,  # zstd
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
    b"[": "is a JSON array; write one object per line",
}
_NOT_CARRIED = re.compile("[\0\ud800-\udfff]")  # no UTF-8 exists for the one, C ends a text at the other
_CONSTANTS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}


@dataclass(frozen=True)
class Line:
    """One line of a file. `where` is FILE:LINE for messages."""

    where: str
    number: int  # from 1
    fields: dict[str, Any]


def read_lines(name: str, path: Path, constants: bool = False) -> Iterator[Line]:
    """Yield the lines of a UTF-8 file that are not blank. A byte-order mark is skipped.

    constants: accept NaN, Infinity and -Infinity as numbers, which some programs write although JSON has none.
    Raises UserError if the file (`name` in messages) cannot be read or is empty, or if a line is not a JSON object.
    """
    any_line = False
    try:
        with open_regular(path) as file:
            # in bytes: only \n ends a line, while JSON allows U+2028 and others inside a text
            for number, content in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                if len(content) > LONGEST_LINE:
                    raise UserError(f"{path}:{number}: has more than {LONGEST_LINE} bytes; write one object per line")
                whole = content.removeprefix(_BOM) if number == 1 else content
                for start, what in _OTHER_FORMATS.items() if not any_line else ():
                    if whole.lstrip().startswith(start):
                        raise UserError(f"{name} = {path}: {what}")
                if whole.strip():
                    any_line = True
                    yield Line(f"{path}:{number}", number, _parsed(f"{path}:{number}", whole, constants))
    except OSError as error:
        raise UserError(f"{name} = {path}: cannot be read ({error.strerror or error}); give a JSONL file") from error
    if not any_line:
        raise UserError(f"{name} = {path}: is empty; give one JSON object per line")


def _parsed(where: str, content: bytes, constants: bool) -> dict[str, Any]:
    def constant(literal: str) -> float:
        if not constants:
            raise UserError(f"{where}: {literal} is no JSON; write a number or null")
        return _CONSTANTS[literal]

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{where}: field '{shown(twice)}' appears twice; keep one")
        return dict(pairs)

    try:
        text = content.decode().rstrip("\r\n")
        fields = json.loads(text, parse_constant=constant, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON in UTF-8 ({error}); write one object per line") from error
    if not isinstance(fields, dict):
        raise UserError(f"{where}: must be an object, is {type(fields).__name__}; write one object per line")
    return fields


def text_field(where: str, name: str, value: object) -> str:
    """Return `value` if it is a text without lone surrogates and NUL. Raises UserError otherwise."""
    if not isinstance(value, str):
        shown_value = "is missing or null" if value is None else f"= {shown(repr(value))}"
        raise UserError(f"{where}: field '{name}' {shown_value}; must be a text")
    bad = _NOT_CARRIED.search(value)
    if bad is not None:
        what = "the character NUL" if bad[0] == "\0" else "half of a surrogate pair"
        raise UserError(
            f"{where}: field '{name}' has {what} (\\u{ord(bad[0]):04x}) at character {bad.start() + 1}; remove it"
        )
    return value
