"""Wait for what other processes do, with a limit that only a fault reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """Ask until the answer is true, and return it; AssertionError says `what` did not come."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < ends, f"did not come: {what}"
        time.sleep(0.02)
    return found


def lives(pid: int) -> bool:
    """Whether a process is there and not about to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def require_ended(*pids: int) -> None:
    """Wait until none of these processes lives."""
    until(lambda: not any(map(lives, pids)), f"the end of processes {pids}", 20.0)
