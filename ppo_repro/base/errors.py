"""The errors a user can see, by exit code."""

from __future__ import annotations

from collections.abc import Sequence

OUT_OF_MEMORY = "out of memory; `ppo-repro plan CONFIG` says for what, and what to change"
# in the words of torch's CPU allocator, C++ and the system
_OUT_OF_MEMORY = ("allocate memory", "not enough memory", "std::bad_alloc", "out of memory")


class UserError(Exception):
    """Wrong input or files of the user; one line, what is complete stays. Exit code 2."""


class Mistakes(UserError):
    """Several mistakes of the user's, of which each gets a line; as one text they stand one after the other."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)


class FunctionFailed(UserError):
    """A function of the user's failed on an input of a run; `field` of the configuration names it."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class PromiseBroken(Exception):
    """A guarantee of this project did not hold. Exit code 1."""


class NumericsError(UserError):
    """A number is not finite: settings led there."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM; ends a run as Ctrl-C does. Exit code 143."""


class RankLost(KeyboardInterrupt):
    """Another process of this run is gone or does not answer; ends a run as Ctrl-C does. Exit code 3."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an allocation failed: in Python, NumPy, Arrow, torch or the system, wrapped or not."""
    while error is not None:
        said = any(words in str(error).lower() for words in _OUT_OF_MEMORY)
        if isinstance(error, MemoryError) or (said and not isinstance(error, UserError)):
            return True
        error = error.__cause__
    return False
