"""The two numerics: one written order for every sum, or stock torch."""

from __future__ import annotations

from typing import Literal

Mode = Literal["deterministic", "native"]
MODES: tuple[Mode, ...] = ("deterministic", "native")


def is_deterministic_mode(mode: Mode) -> bool:
    """Decide between the numerics; ValueError for any other word, which must not mean stock torch in silence."""
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r}: must be one of {', '.join(MODES)}")
    return mode == "deterministic"
