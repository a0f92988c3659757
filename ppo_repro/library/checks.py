"""What the caller of the library got wrong, in one line: name, value, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ppo_repro.config.mistakes import check_path
from ppo_repro.config.section import LARGEST
from ppo_repro.config.yaml_text import describe_value
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


Overrides = Mapping[str, Any] | Sequence[str]


def override_lines(overrides: Overrides) -> list[str]:
    """Overrides as after --set, from texts FIELD=VALUE or from a dict of fields; UserError for anything else."""
    if isinstance(overrides, Mapping) and all(type(name) is str for name in overrides):
        return [f"{name}={describe_value(value)}" for name, value in overrides.items()]
    if isinstance(overrides, Sequence) and not isinstance(overrides, str) and all(type(o) is str for o in overrides):
        return list(overrides)
    raise UserError(
        f"overrides = {_shown(overrides)}: must be a dict, as {{'layout.threads': 2}}, or a list of texts FIELD=VALUE"
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
