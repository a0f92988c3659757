"""What is told of every step of a run, and may show it to a person."""

from __future__ import annotations


class Watcher:
    """Told of every step of a run; this one shows nothing."""

    def prompts(self, done: int, total: int) -> None:
        """Take note that `done` of `total` prompts are encoded."""

    def warm_start(self, step: int, total: int, loss: float) -> None:
        """Take note of a supervised step: its number from 1, the last step, and the loss in nats per token."""

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        """Take note of a recorded iteration.

        Args:
            done: iterations that are recorded now.
            total: iterations of the run.
            figures: what a person sees of the iteration.
            seconds: wall time of the iteration.
        """

    def servers(self, waited: int, limit: int) -> None:
        """Take note that servers have been starting for `waited` of at most `limit` seconds."""

    def preferences(self, what: str, step: int, total: int, loss: float) -> None:
        """Take note of a step on preference pairs.

        Args:
            what: is trained.
            step: its number, from 1.
            total: the last step.
            loss: before the step, nats per pair.
        """

    def warning(self, text: str) -> None:
        """Take note of what a person should hear, one sentence."""


Silent = Watcher
