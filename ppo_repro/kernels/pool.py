"""One pool of threads for all kernels. Kernels release the GIL, so plain Python threads run them side by side.

Only one pool may be busy: a second one (OpenMP under torch) would spin on the same cores, so torch runs on
one thread while kernels are in use.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# below this a part of the work is done sooner than another thread can be woken
LEAST_NANOSECONDS = 50_000.0

_threads = 1
_executor: ThreadPoolExecutor | None = None


def set_threads(threads: int) -> None:
    """Use this many threads from now on."""
    global _threads, _executor
    if threads == _threads:
        return
    if _executor is not None:
        _executor.shutdown()
    _threads = threads
    _executor = ThreadPoolExecutor(threads - 1, "kernel") if threads > 1 else None


def in_parts(work: Callable[[int, int], None], rows: int, nanoseconds_per_row: float) -> None:
    """Call work(first, last) on consecutive parts of range(rows), side by side if they are worth a thread each.

    The parts must write to different places. Exceptions of any part are raised here.
    """
    parts = min(_threads, rows, max(1, int(rows * nanoseconds_per_row / LEAST_NANOSECONDS)))
    if parts <= 1 or _executor is None:
        if rows:
            work(0, rows)
        return
    bounds = [rows * i // parts for i in range(parts + 1)]
    others = [_executor.submit(work, bounds[i], bounds[i + 1]) for i in range(1, parts)]
    work(0, bounds[1])
    for other in others:
        other.result()
