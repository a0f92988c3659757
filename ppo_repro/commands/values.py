"""Read the values of options. Each function raises ArgumentTypeError for a wrong text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from ppo_repro.base.files import check_path
from ppo_repro.base.latest import run_named
from ppo_repro.base.processes import processes

JSON = "print one JSON object and nothing else on stdout"  # what --json does


def path(text: str) -> Path:
    """Return a path on this machine."""
    return _read(lambda text: Path(check_path(text)), text)


def run_path(text: str) -> Path:
    """Return the path of a run; of several processes the first alone, which has the folder, finds the newest run."""
    return _read(run_named if processes()[0] == 0 else Path, text)


def _read(as_path: Callable[[str], Path], text: str) -> Path:
    try:
        return as_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count(text: str) -> int:
    """Return a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return int(text)


def positive(text: str) -> int:
    """Return a whole number from 1."""
    if not count(text):
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def number(is_allowed: Callable[[float], bool], allowed: str) -> Callable[[str], float]:
    """Return the function that reads a number; `allowed` describes the allowed numbers for an error."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan  # is in no range
        if not is_allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r} must be {allowed}")
        return value

    return read


def iterations(text: str) -> range:
    """Return the iterations of `A:B`, which counts from 0 and includes both."""
    first, colon, last = text.partition(":")
    numbers = range(count(first), count(last if colon else first) + 1)
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins; write A:B, both included, from 0")
    return numbers
