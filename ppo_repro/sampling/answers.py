"""What every response of another program must be; each engine has its own words for what is wrong. No torch here."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from ppo_repro.base.float32 import FLOAT32_MAX


def is_token(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def is_logprob(value: Any) -> bool:
    """Return whether a value is a finite number of nats, at most 0, in the range of float32."""
    return type(value) in (int, float) and math.isfinite(value) and -FLOAT32_MAX <= value <= 0


def early_end(ids: Sequence[int], end_ids: Collection[int]) -> int | None:
    """Return the first place of an end token that is not the last token; None if there is none."""
    return next((place for place, token in enumerate(ids[:-1]) if token in end_ids), None)


def reason_of(ids: Sequence[int], longest: int, end_ids: Collection[int]) -> str | None:
    """Return why a response ended: `stop` after an end token, else `length` at the limit; None if neither is so."""
    return "stop" if ids[-1] in end_ids else "length" if len(ids) == longest else None


def shown_value(value: Any) -> str:
    """Return a value for an error message, in one short line."""
    if isinstance(value, list | tuple):
        return f"{len(value)} entries"
    text = " ".join(repr(value).split())[:100]
    return text if value is None or isinstance(value, str | int | float) else f"{text} of type {type(value).__name__}"
