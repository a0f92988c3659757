"""Child processes that hear Ctrl-C whatever started the tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    """Processes started in this block have the default disposition of SIGINT.

    A shell without job control lets what it starts in the background ignore SIGINT, and children inherit that.
    """
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
