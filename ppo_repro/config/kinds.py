"""The kinds of run, and the configuration of each."""

from __future__ import annotations

from typing import Any, Final, Literal

from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import absolute_paths, build_config, validated
from ppo_repro.config.run import RunConfig

Kind = Literal["language", "control", "dpo"]
LANGUAGE: Final = "language"  # PPO on a language model
CONTROL: Final = "control"  # PPO on Gymnasium environments
DPO: Final = "dpo"  # DPO on preference pairs


def build_config_of(kind: Kind, tree: Any, source: str) -> RunConfig | ControlConfig | DPOConfig:
    """The configuration of a run from a parsed tree; raises UserError on anything wrong."""
    if kind == CONTROL:
        return validated(ControlConfig, tree, source)
    if kind == DPO:
        return validated(DPOConfig, tree, source).with_absolute_paths()
    return absolute_paths(build_config(tree, source))
