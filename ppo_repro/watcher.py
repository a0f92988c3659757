"""Who is told of every step of a run; it may show it to a person."""

from __future__ import annotations

from typing import Protocol


class Watcher(Protocol):
    """Told of every step of a run."""

    def warm_start(self, step: int, total: int, loss: float) -> None: ...

    def iteration(self, done: int, total: int, score: float, accuracy: float, approx_kl: float) -> None: ...

    def servers(self, waited: int, limit: int) -> None: ...

    def preferences(self, what: str, step: int, total: int, loss: float) -> None: ...
    def control(self, done: int, total: int, episode_return: float, approx_kl: float) -> None: ...


class Silent:
    """A watcher that shows nothing."""

    def warm_start(self, step: int, total: int, loss: float) -> None:
        pass

    def iteration(self, done: int, total: int, score: float, accuracy: float, approx_kl: float) -> None:
        pass

    def servers(self, waited: int, limit: int) -> None:
        pass

    def preferences(self, what: str, step: int, total: int, loss: float) -> None:
        pass

    def control(self, done: int, total: int, episode_return: float, approx_kl: float) -> None:
        pass
