"""The two kinds of run, and the configuration of each."""

from __future__ import annotations

from typing import Any, Final, Literal

from ppo_repro.config.control import ControlConfig
from ppo_repro.config.files import absolute_paths, build_config, validated
from ppo_repro.config.run import RunConfig

Kind = Literal["language", "control"]
LANGUAGE: Final = "language"  # PPO on a language model
CONTROL: Final = "control"  # PPO on Gymnasium environments


def build_config_of(kind: Kind, tree: Any, source: str) -> RunConfig | ControlConfig:
    """The configuration of a run from a parsed tree; raises UserError on anything wrong."""
    if kind == CONTROL:
        return validated(ControlConfig, tree, source)
    return absolute_paths(build_config(tree, source))
