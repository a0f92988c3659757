"""Runs that need more memory than there is: refused at the start where that is certain, else one line at the end."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.errors import UserError, is_out_of_memory
from ppo_repro.output import say

if TYPE_CHECKING:
    from ppo_repro.config.run import RunConfig
    from ppo_repro.plan import Plan


def memory_limit() -> int | None:
    """Bytes that this process can have at most: of the machine, its control group or its own limit. None: not known."""
    found = []
    with suppress(OSError, ValueError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + _swap())
    for name in ("memory/memory.limit_in_bytes", "memory.max"):
        try:
            text = (Path("/sys/fs/cgroup") / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            found.append(int(text))
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            found.append(limit)
    return min(found, default=None)


def _swap() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:"))


@contextmanager
def within_memory(config: RunConfig, processes: int = 1) -> Iterator[None]:
    """A run of `config` in `processes` processes on this machine.

    UserError at once where what is certainly needed at once is more than there is,
    and where an allocation in the block fails. Where only the estimate for the largest phase is more, a warning.
    """
    from ppo_repro.plan import in_words, size

    plan = _plan(config, processes)
    words = "" if plan is None else in_words(plan, config.value.kind == "separate")
    limit = memory_limit()
    if plan is not None and limit is not None:
        if processes * plan.certain > limit:
            each = f" in each of {processes} processes" if processes > 1 else ""
            raise UserError(f"not enough memory: {size(limit)} at most, and {words}{each}")
        if processes * plan.peak > limit:
            say(f"memory may run out: {size(limit)} at most, and {words}")
    failed = False
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = True
    # outside of `except`: the error keeps everything alive that its frames hold
    if failed:
        raise out_of_memory(words)


@contextmanager
def within_recorded(run_dir: Path, overrides: Sequence[str], processes: int = 1) -> Iterator[None]:
    """`within_memory` for a recorded run; without a plan where its configuration is not one of a language run."""
    from ppo_repro.records.config_file import load_recorded_config

    try:
        config = load_recorded_config(run_dir, overrides)
    except UserError:  # of another kind, or something that the command itself refuses with a better message
        yield
        return
    with within_memory(config, processes):
        yield


def out_of_memory(plan: str = "") -> UserError:
    """The one line for a failed allocation, with the plan in words where there is one."""
    return UserError(f"out of memory; {plan or 'see `ppo-repro plan CONFIG`'}")


def _plan(config: RunConfig, processes: int) -> Plan | None:
    """None where there is none for a configuration, which the run itself refuses with a better message."""
    from ppo_repro.plan import plan_run

    try:
        return plan_run(config, processes)
    except UserError:
        return None
