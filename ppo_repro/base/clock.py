"""A clock of wall time: it adds every second between its start and its last lap to a phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime

OTHER = "other"  # what lies between the phases that have a name


def now() -> float:
    """Return the seconds since a fixed moment; tests replace this function."""
    return time.perf_counter()


def moment() -> float:
    """Return the present time in seconds since 1970, UTC."""
    return time.time()


def as_text(seconds: float) -> str:
    """Return a moment as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def from_text(text: str) -> float:
    """Return the moment of an ISO 8601 text, in seconds since 1970, UTC. Raises ValueError for any other text."""
    return datetime.fromisoformat(text).timestamp()


class Clock:
    """Wall seconds by phase; their sum is the time from the start to the last lap."""

    def __init__(self) -> None:
        self.started = moment()
        self.seconds = defaultdict[str, float](float)
        self._last = now()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to `phase`."""
        self.seconds[phase] += self._elapsed()

    def divide(self, parts: Mapping[str, float]) -> None:
        """Divide the time since the last lap: each phase of `parts` gets its seconds, and OTHER gets the remaining
        seconds.
        """
        elapsed = self._elapsed()
        for phase, spent in parts.items():
            self.seconds[phase] += spent
        self.seconds[OTHER] += elapsed - sum(parts.values())

    def with_total(self) -> dict[str, float]:
        """Return the seconds of each phase, OTHER last, and their sum as `total`."""
        last = {OTHER: self.seconds[OTHER]} if OTHER in self.seconds else {}
        named = {phase: spent for phase, spent in self.seconds.items() if phase != OTHER}
        return {**named, **last, "total": sum(self.seconds.values())}

    def _elapsed(self) -> float:
        before, self._last = self._last, now()
        return self._last - before


def duration(seconds: float) -> str:
    """Return the seconds in the largest unit that gives a whole number above 1, such as `3 min`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
