"""One pool of threads for all kernels. Kernels release the GIL, so plain Python threads run them in parallel.

Only one pool may be busy: a second one (torch's OpenMP) would spin on the same cores, so torch runs on one thread while
kernels are in use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread, local
from typing import TypeVar

# work shorter than this is done sooner than another thread can be woken
LEAST_NANOSECONDS = 50_000.0

Work = Callable[[int, int], None]
Outcomes = SimpleQueue[BaseException | None]
# SimpleQueue is written in C: threads start 2 to 3 times sooner than with futures
_Tasks = SimpleQueue[tuple[Work, int, int, Outcomes] | None]

_threads = 1
_tasks: _Tasks = SimpleQueue()


class _Limit(local):
    threads = 0  # how many the current thread may use; 0 for all


_limit = _Limit()

A = TypeVar("A")
B = TypeVar("B")


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        work, first, last, outcomes = task
        try:
            work(first, last)
        except BaseException as error:
            outcomes.put(error)
        else:
            outcomes.put(None)


def set_threads(threads: int) -> None:
    """Use this many threads from now on."""
    global _threads, _tasks
    if threads == _threads:
        return
    for _ in range(_threads - 1):
        _tasks.put(None)
    _threads, _tasks = threads, SimpleQueue()
    for _ in range(threads - 1):
        Thread(target=_serve, args=(_tasks,), name="kernel", daemon=True).start()


def _begin_anew() -> None:
    """In a process that was forked: the threads have stayed with its parent."""
    global _threads
    count, _threads = _threads, 1
    set_threads(count)


os.register_at_fork(after_in_child=_begin_anew)


def threads() -> int:
    """How many threads a kernel that the current thread calls may use."""
    return _limit.threads or _threads


def both(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """first() and second() in parallel, with half of the threads each; in turn where there is only one thread.

    They must not depend on each other. Both have ended when this returns; the first exception is raised here.
    """
    available = threads()
    if available < 2:
        return first(), second()
    results: list[B] = []

    def other(_: int, half: int) -> None:
        with limited_to(half):
            results.append(second())

    outcomes: Outcomes = SimpleQueue()
    _tasks.put((other, 0, available // 2, outcomes))
    try:
        with limited_to(available - available // 2):
            result = first()
    finally:
        error = outcomes.get()
    if error is not None:
        raise error
    return result, results[0]


@contextmanager
def limited_to(count: int) -> Iterator[None]:
    """Kernels that the current thread calls inside use up to `count` threads.

    A part of `in_parts` that calls `in_parts` must have one: it must not wait for threads that wait themselves.
    """
    before, _limit.threads = _limit.threads, count
    try:
        yield
    finally:
        _limit.threads = before


def in_parts(work: Work, rows: int, nanoseconds_per_row: float) -> None:
    """Call work(first, last) for consecutive parts of range(rows), in parallel where each is worth a thread.

    The parts must write to different memory. All have ended when this returns; the first exception is raised here.
    """
    parts = min(threads(), rows, max(1, int(rows * nanoseconds_per_row / LEAST_NANOSECONDS)))
    if parts <= 1:
        if rows:
            work(0, rows)
        return
    bounds = [rows * i // parts for i in range(parts + 1)]
    outcomes: Outcomes = SimpleQueue()
    for i in range(1, parts):
        _tasks.put((work, bounds[i], bounds[i + 1], outcomes))
    try:
        work(0, bounds[1])
    finally:
        errors = [outcomes.get() for _ in range(1, parts)]
    for error in errors:
        if error is not None:
            raise error


def results_of_parts(work: Callable[[int, int], A], rows: int, nanoseconds_per_row: float) -> list[A]:
    """`in_parts`; returns what `work` returned for each part, in no fixed order."""
    results: list[A] = []
    in_parts(lambda first, last: results.append(work(first, last)), rows, nanoseconds_per_row)
    return results
