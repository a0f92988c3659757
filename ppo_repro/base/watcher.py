"""The interface through which a run reports its steps, for example to show them to a person."""

from __future__ import annotations


class Watcher:
    """Receives every step of a run; this base class shows nothing."""

    def step(self, name: str, done: int, total: int, figures: str) -> None:
        """Report a step of work other than an iteration.

        Args:
            name: of the work, such as `warm start`.
            done: steps done so far, such as prompts, or seconds waited.
            total: of the work.
            figures: results of the step, as text for a person.
        """

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        """Report a recorded iteration.

        Args:
            done: number of iterations recorded so far.
            total: iterations of the run.
            figures: results of the iteration, as text for a person.
            seconds: wall time of the iteration.
        """

    def note(self, text: str) -> None:
        """Report a fact about the run for a person, one sentence."""

    def warning(self, text: str) -> None:
        """Report a warning for a person, one sentence."""


Silent = Watcher
