"""Find the memory of a run's machine or GPU, and check that the planned memory fits."""

from __future__ import annotations

import os
from contextlib import suppress
from math import ceil
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import say, size
from ppo_repro.config.kinds import AnyConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.numerics.devices import Card, device_count, kernels_of, torch_device
from ppo_repro.runs.plan import Plan, plan_run

ADVICE = (
    "set lora or layout.gradient_checkpointing, lower layout.rollout_slots, forward_micro_batch or update_micro_batch "
    "(0 takes all), or take a smaller model; see `ppo-repro plan`"
)


def memory_limit() -> int | None:
    """Return the memory in bytes of this machine, or of its control group if that has less; None if unknown."""
    limits = []
    with suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in _limit_files():
        with suppress(OSError, ValueError):
            limits.append(int(file.read_text()))
    return min(limits, default=None)


def memory_of(config: RunConfig, rank: int = 0) -> int | None:
    """Return the bytes of the machine, or of the GPU, that a process of a run computes on; None if unknown.

    Raises UserError if the GPU cannot be used.
    """
    if config.layout.device == "cpu":
        return memory_limit()
    if config.numerics.mode != "deterministic":
        return None
    kernels = kernels_of(torch_device(config.layout.device, rank))  # opens the GPU; a process can have only one
    return kernels.free_bytes()[1] if isinstance(kernels, Card) else None


def _limit_files() -> list[Path]:
    """Return where Linux has the memory limits of this process's control group and of those above it."""
    root, files = Path("/sys/fs/cgroup"), list[Path]()
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            top, name = (root, "memory.max") if not kinds else (root / "memory", "memory.limit_in_bytes")
            if not kinds or "memory" in kinds.split(","):
                group = top / path.lstrip("/")
                files += [above / name for above in (group, *group.parents) if above.is_relative_to(top)]
    return [*files, root / "memory.max", root / "memory" / "memory.limit_in_bytes"]


def require_memory(config: AnyConfig, processes: int, rank: int) -> None:
    """Raise UserError if a language run certainly needs more memory than the machine, or the GPU of `rank`, has.

    Print a warning if only the estimate exceeds the memory.
    """
    if not isinstance(config, RunConfig):
        return
    limit = memory_of(config, rank)
    if limit is None:
        return
    plan = plan_run(config, processes)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))  # torchrun's processes on this machine
    here = ceil(here / device_count(config.layout.device))  # on one GPU
    phase = plan.largest_phase
    name = max(plan.rows, key=lambda row: plan.rows[row].get(phase, 0))
    largest = f"most of it for {name} in {phase}: {size(plan.rows[name][phase])}"
    each = f" in each of {here} processes here" if here > 1 else ""
    words = f"{size(limit)} at most, and the plan needs up to about {size(plan.peak)}{each}, {largest}; {ADVICE}"
    if here * plan.certain > limit:
        raise UserError(f"not enough memory: {words}")
    if here * plan.peak > limit:
        say(f"memory may run out: {words}")


def room(config: RunConfig, plan: Plan, memory: int) -> str:
    """Return `memory`, bytes of a machine or GPU, and whether the processes of the plan have room.

    They share a machine and, with `layout.device: cuda`, its GPUs.
    """
    fit = min(memory // plan.peak * device_count(config.layout.device), plan.processes)
    of = f" for {fit or 'one'} of {plan.processes} processes" if plan.processes > 1 else ""
    return f"{size(memory)}, {'enough' if fit else 'not enough'}{of}"
