"""The interface through which a run reports its steps, for example to show them to a person."""

from __future__ import annotations


class Watcher:
    """Receives every step of a run; this base class shows nothing."""

    def prompts(self, done: int, total: int) -> None:
        """Report that `done` of `total` prompts are encoded."""

    def warm_start(self, step: int, total: int, loss: float) -> None:
        """Report supervised step `step` (from 1) of `total`, and its loss in nats per token."""

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        """Report a recorded iteration.

        Args:
            done: number of iterations recorded so far.
            total: iterations of the run.
            figures: results of the iteration, as text for a person.
            seconds: wall time of the iteration.
        """

    def servers(self, waited: int, limit: int) -> None:
        """Report that servers have been starting for `waited` of at most `limit` seconds."""

    def preferences(self, what: str, step: int, total: int, loss: float) -> None:
        """Report a step of training on preference pairs.

        Args:
            what: name of the training.
            step: its number, from 1.
            total: number of steps.
            loss: before the step, nats per pair.
        """

    def note(self, text: str) -> None:
        """Report a fact about the run for a person, one sentence."""

    def warning(self, text: str) -> None:
        """Report a warning for a person, one sentence."""


Silent = Watcher
