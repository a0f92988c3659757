"""The two kinds of run, and the configuration of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from ppo_repro.config.control import ControlConfig
from ppo_repro.config.files import absolute_paths, build_config, read_tree, validated
from ppo_repro.config.run import RunConfig

Kind = Literal["language", "control"]
LANGUAGE: Final = "language"  # PPO on a language model
CONTROL: Final = "control"  # PPO on Gymnasium environments


def build_config_of(kind: Kind, tree: Any, source: str) -> RunConfig | ControlConfig:
    """The configuration of a run from a parsed tree; raises UserError on anything wrong."""
    if kind == CONTROL:
        return validated(ControlConfig, tree, source)
    return absolute_paths(build_config(tree, source))


def load_config_of(kind: Kind, path: Path, overrides: Sequence[str] = ()) -> RunConfig | ControlConfig:
    """Read a YAML configuration and apply `a.b=c` overrides; raises UserError on anything wrong."""
    return build_config_of(kind, read_tree(path, overrides), str(path))
