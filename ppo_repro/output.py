"""What a command says on stdout: lines for people, or one JSON object."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

_SHOWN = 100  # characters of a text in a message


def print_json(value: dict[str, Any]) -> None:
    """One object on one line; NaN and infinities as words."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def print_result(as_json: bool, value: dict[str, Any], lines: Sequence[str]) -> None:
    """One of the two."""
    if as_json:
        print_json(value)
    else:
        print("\n".join(lines))


def printable(text: str) -> str:
    """The text on one line, with escapes for what a terminal does not print but obeys."""
    line = " ".join(text.splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def shown(text: str) -> str:
    """A text of the user's for a message: on one line, cut where it is long."""
    return printable(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)")


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as words: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def say(line: str) -> None:
    """One line on stderr; of several processes only the first one speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
