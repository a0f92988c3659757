"""The small run the tests share."""

from pathlib import Path

from ppo_repro.config import RunConfig
from ppo_repro.config_yaml import load_config

SMALL = Path(__file__).with_name("small.yaml")


def small_config(*overrides: str) -> RunConfig:
    """`small.yaml` with some fields changed."""
    return load_config(SMALL, overrides)
