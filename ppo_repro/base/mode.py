"""The numerics: `deterministic`, one fixed order for every sum, in two precisions; and `native`, stock torch."""

from __future__ import annotations

from typing import Literal

Mode = Literal["deterministic", "native"]
MODES: tuple[Mode, ...] = ("deterministic", "native")
Precision = Literal["highest", "high"]  # of linear layers: chains of float32, or exact sums of integers


def is_deterministic_mode(mode: Mode) -> bool:
    """Decide between the numerics; ValueError for any other word, which must not mean stock torch in silence."""
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r}: must be one of {', '.join(MODES)}")
    return mode == "deterministic"
