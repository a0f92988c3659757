"""A run that needs more memory than there is is refused at the start, if that is certain."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.errors import UserError
from ppo_repro.output import say

if TYPE_CHECKING:
    from ppo_repro.config.control import ControlConfig
    from ppo_repro.config.dpo import DPOConfig
    from ppo_repro.config.run import RunConfig

OUT_OF_MEMORY = "out of memory; `ppo-repro plan CONFIG` says for what, and what to change"


def memory_limit() -> int | None:
    """Bytes of this machine, or of its control group if it has fewer; None if they are not known."""
    limits = []
    with suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in ("memory/memory.limit_in_bytes", "memory.max"):
        with suppress(OSError, ValueError):
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return min(limits, default=None)


def require_memory(config: RunConfig | ControlConfig | DPOConfig, processes: int) -> None:
    """UserError if a language run certainly needs more than there is; a warning if only the estimate is more."""
    from ppo_repro.config.run import RunConfig
    from ppo_repro.plan import in_words, plan_run, size

    limit = memory_limit()
    if limit is None or not isinstance(config, RunConfig) or config.layout.device != "cpu":
        return
    plan = plan_run(config, processes)
    each = f" in each of {processes} processes" if processes > 1 else ""
    words = f"{size(limit)} at most, and {in_words(plan)}{each}"
    if processes * plan.certain > limit:
        raise UserError(f"not enough memory: {words}")
    if processes * plan.peak > limit:
        say(f"memory may run out: {words}")
