"""Errors that a user can see, by exit code."""

from __future__ import annotations

from collections.abc import Sequence

OUT_OF_MEMORY = "out of memory; `ppo-repro plan CONFIG` says for what, and what to change"
# words by which torch's CPU allocator, C++ and the system report it
_OUT_OF_MEMORY = ("allocate memory", "not enough memory", "std::bad_alloc", "out of memory")


class UserError(Exception):
    """The user's input or files are wrong. The message is one line, and the run keeps its complete iterations. Exit
    code 2.
    """


class Mistakes(UserError):
    """The user made several mistakes. `lines` has one line for each, and the message joins the lines."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)


class FunctionFailed(UserError):
    """A function of the user failed on an input of a run. `field` of the configuration names the function."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class OutOfMemory(UserError, MemoryError):
    """Memory is full. What the kernels had computed in the call is lost. Weights are as before."""


class PromiseBroken(Exception):
    """A guarantee of this project did not hold. Exit code 1."""


class NumericsError(UserError):
    """A number is not finite, and the user's settings are the cause."""


class Terminated(KeyboardInterrupt):
    """SIGTERM asked the process to end. A run ends as after Ctrl-C. Exit code 143."""


class RankLost(KeyboardInterrupt):
    """Another process of this run is gone or does not answer. The run ends as after Ctrl-C. Exit code 3."""

    EXIT_CODE = 3


def mistakes_in(error: Exception) -> tuple[str, ...]:
    """Return a line for each mistake of the user that an error reports; () for a fault of this package."""
    if isinstance(error, UserError):
        return error.lines if isinstance(error, Mistakes) else (str(error),)
    if is_out_of_memory(error):
        return (OUT_OF_MEMORY,)
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return (f"{error.filename}: cannot be used ({error.strerror})",)
    return ()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is a failed allocation in Python, NumPy, Arrow, torch or the system."""
    while error is not None:
        says_so = any(words in str(error).lower() for words in _OUT_OF_MEMORY)
        if isinstance(error, MemoryError) or (says_so and not isinstance(error, UserError)):
            return True
        error = error.__cause__
    return False
