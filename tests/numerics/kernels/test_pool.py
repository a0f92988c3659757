"""The threads of the kernels: each row once, errors raised after all parts have ended, threads replaced."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.numerics.kernels.core import pool


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    pool.set_threads(1)


@given(st.integers(1, 5), st.integers(0, 40), st.sampled_from([1.0, pool.LEAST_NANOSECONDS / 3, 1e9]))
def test_every_row_once_in_consecutive_parts(threads: int, rows: int, cost: float) -> None:
    pool.set_threads(threads)
    parts: list[tuple[int, int]] = []
    pool.in_parts(lambda first, last: parts.append((first, last)), rows, cost)
    assert [row for first, last in sorted(parts) for row in range(first, last)] == list(range(rows))
    worth = int(rows * cost / pool.LEAST_NANOSECONDS)
    assert len(parts) == min(threads, rows, max(1, worth))


def test_parts_run_in_parallel() -> None:
    pool.set_threads(3)
    together = threading.Barrier(3, timeout=20)
    pool.in_parts(lambda first, last: together.wait() and None, 3, 1e9)


@pytest.mark.parametrize("threads", [2, 3, 4, 7])
def test_two_functions_run_in_parallel_with_half_of_the_threads_each(threads: int) -> None:
    pool.set_threads(threads)
    together = threading.Barrier(2, timeout=20)

    def half() -> tuple[int, list[tuple[int, int]]]:
        together.wait()
        parts: list[tuple[int, int]] = []
        pool.in_parts(lambda first, last: parts.append((first, last)), 40, 1e9)
        together.wait()
        return pool.threads(), parts

    (first, first_parts), (second, second_parts) = pool.both(half, half)
    assert (first, second) == (threads - threads // 2, threads // 2)
    assert (len(first_parts), len(second_parts)) == (first, second)
    for parts in (first_parts, second_parts):
        assert [row for a, b in sorted(parts) for row in range(a, b)] == list(range(40))
    assert pool.threads() == threads, "all of them again"


def test_on_one_thread_two_functions_run_in_turn() -> None:
    order: list[int] = []
    assert pool.both(lambda: order.append(1) or "a", lambda: order.append(2) or "b") == ("a", "b")
    assert order == [1, 2]


@pytest.mark.parametrize("failing", [{1}, {2}, {1, 2}])
def test_an_error_of_one_of_two_functions_is_raised_when_both_have_ended(failing: set[int]) -> None:
    pool.set_threads(2)
    ended: list[int] = []

    def work(number: int) -> None:
        if number in failing:
            raise ValueError(f"function {number}")
        time.sleep(0.05)
        ended.append(number)

    with pytest.raises(ValueError, match=f"function {min(failing)}"):
        pool.both(lambda: work(1), lambda: work(2))
    assert ended == sorted({1, 2} - failing)
    assert pool.threads() == 2
    assert pool.both(lambda: 1, lambda: 2) == (1, 2), "the threads still work"


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_any_part_is_raised_when_all_have_ended(failing: int) -> None:
    pool.set_threads(3)
    ended: list[int] = []

    def work(first: int, last: int) -> None:
        if first == failing:
            raise ValueError(f"part {first}")
        time.sleep(0.05)
        ended.append(first)

    with pytest.raises(ValueError, match=f"part {failing}"):
        pool.in_parts(work, 3, 1e9)
    assert sorted(ended) == sorted({0, 1, 2} - {failing})
    pool.in_parts(lambda first, last: ended.append(9), 3, 1e9)
    assert ended.count(9) == 3, "the threads still work"


def test_a_process_that_was_forked_has_threads_of_its_own() -> None:
    pool.set_threads(3)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # without them the parts would wait for ever
        together = threading.Barrier(3, timeout=10)
        pool.in_parts(lambda first, last: together.wait() and None, 3, 1e9)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_no_longer_wanted_end() -> None:
    def kernels() -> int:
        return sum(t.name == "kernel" and t.is_alive() for t in threading.enumerate())

    pool.set_threads(4)
    assert kernels() >= 3
    pool.set_threads(1)
    until = time.monotonic() + 10
    while kernels() and time.monotonic() < until:
        time.sleep(0.01)
    assert kernels() == 0
