"""Where a check computes: on the device of the configuration, which is decided once and said."""

from __future__ import annotations

from typing import Literal

from ppo_repro.config.layout import LayoutConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.numerics.device import placed
from ppo_repro.output import say


def decided(config: RunConfig) -> RunConfig:
    """The configuration with `layout.device` as it is here; stderr hears of it. UserError as of `placed`.

    Its own numerics do not matter: a check computes in both, on the same device.
    """
    place = placed(config.layout.device, config.layout.backend, 1)
    place.tell(say)
    return place.of(config)


def plainest(layout: LayoutConfig, mode: Literal["exact", "native"]) -> LayoutConfig:
    """The plainest layout on the device of a decided one; on a card with its kernels."""
    if layout.device == "cpu":
        return LayoutConfig()
    return LayoutConfig(device=layout.device, backend=layout.backend if mode == "exact" else "auto")
