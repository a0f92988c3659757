"""Numbers that stopped being finite, said with the learning rates that usually led there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ppo_repro.config.section import Section
from ppo_repro.errors import NumericsError, UserError


@contextmanager
def naming_learning_rates(config: Section) -> Iterator[None]:
    """Add every learning rate of the configuration, the highest first, to a NumericsError; it becomes a UserError."""
    try:
        yield
    except NumericsError as error:
        rates = sorted(_learning_rates("", config.model_dump(mode="json")), key=lambda rate: -rate[1])
        named = ", ".join(f"{path} = {rate:g}" for path, rate in rates)
        raise UserError(f"{error}; lower the highest of {named}") from error


def _learning_rates(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _learning_rates(f"{path}.{name}" if path else str(name), child)
    elif path.endswith("learning_rate") and isinstance(value, int | float):
        yield path, float(value)
