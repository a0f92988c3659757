"""Several processes on one run: the first one records and prints, the others compute along."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from ppo_repro.clock import Clock
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.ranks import Ranks
from ppo_repro.runs.kind import Execution, Item


def require_same_start(ranks: Ranks, config: RunConfig | ControlConfig | DPOConfig, inputs: Mapping[str, str]) -> None:
    """Raise PromiseBroken, naming the process, where configuration or input files differ."""
    ranks.require_same("configuration", config.digest())
    ranks.require_same("input files", sorted(inputs.values()))


def work_along(opened: AbstractContextManager[Execution[Item]]) -> None:
    """What a process does that does not record: it computes everything and keeps nothing."""
    with opened as execution:
        for _ in execution.iterations():
            pass
        execution.ending(Clock())
