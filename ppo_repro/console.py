"""What commands print for programs."""

from __future__ import annotations

import json
import math
from typing import Any


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout, on one line."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as words: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
