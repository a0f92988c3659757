"""What is told of every step of a run, and may show it to a person."""

from __future__ import annotations


class Watcher:
    """Told of every step of a run; this one shows nothing."""

    def prompts(self, done: int, total: int) -> None: ...

    def warm_start(self, step: int, total: int, loss: float) -> None: ...

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        """Take note of a complete iteration, which took so many seconds."""

    def servers(self, waited: int, limit: int) -> None: ...

    def preferences(self, what: str, step: int, total: int, loss: float) -> None: ...

    def warning(self, text: str) -> None: ...


Silent = Watcher
