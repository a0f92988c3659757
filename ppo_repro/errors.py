"""The errors a user can see, by exit code."""

from __future__ import annotations

import errno
from collections.abc import Sequence

# how torch says it: its CPU allocator raises RuntimeError, with these words and the number of bytes
_TORCH_WORDS = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
_SYSTEM_WORDS = "cannot allocate memory"  # safetensors passes on what the system said


class UserError(Exception):
    """Wrong input or files of the user; one line, what is complete stays. Exit code 2."""


class Mistakes(UserError):
    """Several mistakes of the user's, of which each gets a line; as one text they stand one after the other."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)


class PromiseBroken(Exception):
    """A guarantee of this project did not hold. Exit code 1."""


class NumericsError(UserError):
    """A number is not finite, or outside the range in which the exact numerics are exact: settings led there."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM; ends a run as Ctrl-C does. Exit code 143."""


class RankLost(KeyboardInterrupt):
    """Another process of this run is gone or does not answer; ends a run as Ctrl-C does. Exit code 3."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed: in Python, NumPy, Arrow, torch or the system, also where another error hides it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error).lower()
        if isinstance(error, MemoryError):  # also NumPy's _ArrayMemoryError and Arrow's ArrowMemoryError
            return True
        if isinstance(error, RuntimeError) and any(words in text for words in _TORCH_WORDS):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if _SYSTEM_WORDS in text and not isinstance(error, UserError):  # those of a user error are in its cause
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
