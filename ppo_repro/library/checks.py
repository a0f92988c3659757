"""What the caller of the library got wrong, in one line: name, value, what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path

from ppo_repro.config.mistakes import check_path
from ppo_repro.config.section import LARGEST
from ppo_repro.errors import UserError


def is_whole(value: object) -> bool:
    """Whether it is a whole number, Python's or NumPy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return " ".join(f"{value!r:.60}".split())


def check_count(name: str, value: object, least: int, most: int) -> None:
    """UserError unless `value` is a whole number in least..most; True is none."""
    if not is_whole(value) or not least <= value <= most:  # type: ignore[operator]
        raise UserError(f"{name} = {_shown(value)}: must be a whole number in {least}..{most}")


def check_number(name: str, value: object, least: float, most: float = LARGEST) -> None:
    """UserError unless `value` is a number in least..most."""
    if not isinstance(value, Real) or isinstance(value, bool) or not least <= value <= most:  # type: ignore[operator]
        raise UserError(f"{name} = {_shown(value)}: must be a number in {least:g}..{most:g}")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """UserError unless `value` is one of the words allowed."""
    if value not in allowed:
        raise UserError(f"{name} = {_shown(value)}: must be one of {', '.join(allowed)}")


def check_overrides(overrides: object) -> None:
    """UserError unless they are a list of texts."""
    if isinstance(overrides, str) or not isinstance(overrides, Sequence) or any(type(o) is not str for o in overrides):
        raise UserError(
            f"overrides = {_shown(overrides)}: must be a list of texts FIELD=VALUE, as ['layout.threads=2']"
        )


def folder_of(name: str, path: object) -> Path:
    """The path; UserError where no folder of this machine can have it."""
    if not isinstance(path, str | Path):
        raise UserError(f"{name} = {_shown(path)}: must be a path")
    try:
        check_path(str(path))
    except ValueError as error:
        raise UserError(f"{name} = {str(path)[:80]!r}: {error}") from error
    return Path(path)
