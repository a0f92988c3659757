"""The settings that exact numerics need beside a model's config."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ppo_repro.errors import UserError

ARCHITECTURE = "PpoReproExactForCausalLM"
ATTENTION_BACKEND = "ppo_repro_exact"
KEY = "ppo_repro"  # in the model's config, set by --json-model-override-args


@dataclass(frozen=True)
class Settings:
    """The fields of `numerics` and `layout` of a run's configuration that a server needs."""

    max_context: int
    threads: int


def read_settings(config: Any) -> Settings:
    """The settings in a model's config; UserError names the one that is missing, unknown or wrong."""
    values = getattr(config, KEY, None)
    names = [field.name for field in fields(Settings)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise UserError(
            f"--json-model-override-args: {KEY} = {values!r}; must be an object with exactly {', '.join(names)}"
        )
    settings = Settings(**values)
    wrong = {
        "max_context": type(settings.max_context) is not int or not 2 <= settings.max_context <= 32768,
        "threads": type(settings.threads) is not int or settings.threads < 1,
    }
    for name in (name for name, broken in wrong.items() if broken):
        raise UserError(f"--json-model-override-args: {KEY}.{name} = {values[name]!r} is not allowed")
    return settings
